"""Frozen parts of a model whose weights train otherwise (method ``full``), chosen by patterns on parameter names.

A pattern is a name with ``*``, ``?`` and ``[0-9]``, where ``*`` also stands for dots: ``model.layers.[0-9].*``.
A tied weight has several names, and is chosen by any of them.
"""

from fnmatch import fnmatchcase
from typing import Any

from kit.config.settings.method import MethodSettings
from kit.errors import Problem, did_you_mean
from kit.model.reach import out_of_reach


def freeze(model: Any, settings: MethodSettings) -> None:
    """Freeze the parameters that match ``freeze``, or all that do not match ``train_only``."""
    chosen = _chosen(model, settings.freeze or settings.train_only or [])
    for parameter in model.parameters():
        if (id(parameter) in chosen) != bool(settings.train_only):
            parameter.requires_grad_(False)


def check_freeze(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check that every pattern matches a parameter, and that something is left to train. Does not change the model."""
    field, patterns = ("freeze", settings.freeze) if settings.freeze else ("train_only", settings.train_only)
    names = [name for name, _ in meta_model.named_parameters(remove_duplicate=False)]
    problems = [
        Problem(field, f"{pattern!r} matches no parameter", f"a pattern such as {names[0]!r}", _hint(pattern, names))
        for pattern in patterns or []
        if not _matching(pattern, names)
    ]
    chosen = _chosen(meta_model, patterns or [])
    away = _chosen(meta_model, [f"{name}*" for name in out_of_reach(meta_model)])
    rest = {id(p) for p in meta_model.parameters()} - away
    if not problems and patterns and not (rest - chosen if settings.freeze else rest & chosen):
        problems.append(Problem(field, "nothing is left to train", "some parameter that no pattern matches"))
    return problems


def _chosen(model: Any, patterns: list[str]) -> set[int]:
    """The ``id`` of each parameter that has a name which matches one of ``patterns``."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {id(p) for name, p in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _matching(pattern: str, names: list[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _hint(pattern: str, names: list[str]) -> str:
    """A pattern near ``pattern`` that matches, as a question; empty if there is none."""
    for near in (f"{pattern}*", f"*{pattern}", f"*{pattern}*"):
        if _matching(near, names):
            return f"did you mean {near!r}?"
    parts = [name.split(".") for name in names]
    modules = {".".join([*words[:i], "*"]) for words in parts for i in range(1, len(words))}
    return did_you_mean(pattern, [*names, *sorted(modules)])
