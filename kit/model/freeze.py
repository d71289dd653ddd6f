"""Frozen parts of a model whose weights train otherwise (method ``full``), chosen by patterns on parameter names.

A pattern is a name with ``*``, ``?`` and ``[0-9]``, where ``*`` also stands for dots: ``model.layers.[0-9].*``.
A tied weight has several names, and is chosen by any of them.
"""

from fnmatch import fnmatchcase
from typing import Any

from kit.config.settings.method import MethodSettings
from kit.errors import Problem, did_you_mean
from kit.model.reach import unreached_parts


def freeze(model: Any, settings: MethodSettings) -> None:
    """Freeze the parameters that match ``freeze``, or all that do not match ``train_only``."""
    if settings.train_only:
        trained = _matched_parameters(model, settings.train_only)
        frozen = {id(parameter) for parameter in model.parameters()} - trained
    else:
        frozen = _matched_parameters(model, settings.freeze or [])
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)


def check_freeze(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check that every pattern matches a parameter, and that something is left to train. Does not change the model."""
    field, patterns = ("freeze", settings.freeze) if settings.freeze else ("train_only", settings.train_only or [])
    names = [name for name, _ in meta_model.named_parameters(remove_duplicate=False)]
    problems = [
        Problem(
            field, f"{pattern!r} matches no parameter", f"a pattern such as {names[0]!r}", did_you_mean(pattern, names)
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        return problems
    matched = _matched_parameters(meta_model, patterns)
    unreached = _matched_parameters(meta_model, [f"{name}*" for name in unreached_parts(meta_model)])
    reached = {id(parameter) for parameter in meta_model.parameters()} - unreached
    trained = reached & matched if settings.train_only else reached - matched
    if not trained:
        return [Problem(field, "nothing is left to train", "some parameter that no pattern matches")]
    return []


def _matched_parameters(model: Any, patterns: list[str]) -> set[int]:
    """The ``id`` of each parameter that has a name which matches one of ``patterns``."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {id(p) for name, p in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}
