"""Rules against conflicting settings. Each is declared in the file of the settings that it concerns."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Settings that cannot be used together, and the message about them.

    Attributes:
        keys: all settings that take part, separated by spaces; the message names the first one.
        broken: takes the recipe and returns something true if the rule is broken. None: it is broken if all are set.
        found: may quote the recipe (``{r.method}``) and what ``broken`` has returned (``{it}``).
        fix: what to type.
    """

    keys: str
    broken: Callable[[Any], object] | None
    found: str
    fix: str


def is_given(recipe: Any, name: str) -> bool:
    """Return whether the setting has another value than its default, and is not off."""
    value = getattr(recipe, name)
    return value is not False and bool(value != type(recipe).model_fields[name].default)


def steps_rules(what: str) -> tuple[Rule, ...]:
    """Return the rules between ``eval_strategy`` and ``eval_steps``, or those of saves."""
    keys = f"{what}_strategy {what}_steps"

    def values(recipe: Any) -> tuple[Any, Any]:
        steps = getattr(recipe, f"{what}_steps")
        return getattr(recipe, f"{what}_strategy"), 0 if steps == "auto" else steps

    return (
        Rule(
            keys,
            lambda r: values(r)[0] == "steps" and not values(r)[1],
            f"steps without {what}_steps",
            f"--{what}_steps 100, or another number",
        ),
        Rule(
            keys,
            lambda r: values(r)[0] in ("no", "epoch") and values(r)[1],
            f"{{r.{what}_strategy}}, with {what}_steps {{it:g}}",
            f"--{what}_steps 0; or --{what}_strategy steps",
        ),
    )
