"""What trains, or gets adapters, chosen by patterns on parameter names.

A pattern is a name with ``*``, ``?`` and ``[0-9]``, where ``*`` also stands for dots: ``model.layers.[0-9].*``.
A tied weight has several names, and is chosen by any of them. ``vision``, ``audio``, ``projector`` and
``language`` stand for the parts of a multimodal model. Without their names what is not language stays frozen.
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from kit.config.settings.method import MethodSettings
from kit.model.adapters.reach import unreached_parts
from kit.system.errors import Problem, did_you_mean

PARTS = ("vision", "audio", "projector", "language")
# Projectors from an encoder to the language model, in or next to the tower, and in none of its layers.
_PROJECTOR = re.compile(r"^([a-z_]\w*\.)*\w*(merger|projector|projection|connector|multi_modal|aligner)\w*(\.|$)")


def freeze(model: Any, settings: MethodSettings) -> None:
    """Freeze the parameters that match ``freeze``, and all that do not match ``train_only``."""
    trained = trained_parameters(model, settings)
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def check_freeze(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check that every pattern matches a parameter, and that something is left to train. Does not change the model."""
    names = [name for name, _ in meta_model.named_parameters(remove_duplicate=False)]
    problems = [
        Problem(
            field, f"{pattern!r} matches no parameter", f"a pattern such as {names[0]!r}", did_you_mean(pattern, names)
        )
        for field in ("freeze", "train_only")
        for pattern in getattr(settings, field) or ()
        if not _matched_parameters(meta_model, [pattern])
    ]
    if problems:
        return problems
    unreached = _matched_parameters(meta_model, [f"{name}*" for name in unreached_parts(meta_model)])
    unreached -= trained_encoders(meta_model, settings)
    if not trained_parameters(meta_model, settings) - unreached:
        field = "freeze" if settings.freeze else "train_only"
        return [Problem(field, "nothing is left to train", "some parameter that no pattern matches")]
    fix = "leave it out; or name encoders and projectors as the parts vision, audio and projector"
    return [
        Problem(
            "train_only", f"{pattern!r} matches only parameters that stay frozen: text gives them no gradient", fix=fix
        )
        for pattern in settings.train_only or ()
        if _matched_parameters(meta_model, [pattern]) <= unreached
    ]


def trained_parameters(model: Any, settings: MethodSettings) -> set[int]:
    """Return the ``id`` of each parameter that ``train_only`` and ``freeze`` leave to train, or to adapt."""
    return _matched_parameters(model, settings.train_only or ["*"]) - _matched_parameters(model, settings.freeze or [])


def adapted_weights(model: Any, settings: MethodSettings) -> set[int]:
    """Return those of ``trained_parameters`` to which an adapter can add: not biases."""
    return trained_parameters(model, settings) - _matched_parameters(model, ["*bias"])


def trained_encoders(model: Any, settings: MethodSettings) -> set[int]:
    """Return the ``id`` of each parameter of encoders and projectors that trains if the data have images or audio.

    These are parts that ``train_only`` names. Without it, adapters there too: they were asked for by name.
    """
    if settings.method == "full" or settings.train_only:
        return _matched_parameters(model, [name for name in settings.train_only or [] if name in PARTS[:3]])
    parts = parts_of(model)
    return {id(p) for name, p in model.named_parameters() if p.requires_grad and parts.get(name) in PARTS[:3]}


def _matched_parameters(model: Any, patterns: list[str]) -> set[int]:
    """The ``id`` of each parameter that has a name which matches one of ``patterns``, or is in a part of that name."""
    part_of = parts_of(model) if set(patterns) & set(PARTS) else {}
    return {
        id(p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if part_of.get(name) in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def parts_of(model: Any) -> dict[str, str]:
    """Return which of ``PARTS`` each parameter belongs to, by its name; empty for a text-only model."""
    if model.config.get_text_config() is model.config:
        return {}
    towers = tuple(f"{name}." for name in unreached_parts(model))
    has_vision = hasattr(model.config, "vision_config")
    parts = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        encoder = "vision" if has_vision and "audio" not in name else "audio"
        of_tower = "projector" if _PROJECTOR.search(name) else encoder
        parts[name] = of_tower if f"{name}.".startswith(towers) else "language"
    return parts
