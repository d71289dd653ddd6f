"""Rules between settings that are right one by one. Each stands in the file of the settings that it is about."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Settings that cannot be used together, and what to say where they are.

    Attributes:
        keys: all settings that take part, separated by spaces; the message names the first one.
        broken: takes the recipe; what it returns is false where the rule is kept. None: it is broken where all are set.
        found: may quote the recipe (``{r.method}``) and what ``broken`` has returned (``{it}``).
        fix: what to type.
    """

    keys: str
    broken: Callable[[Any], object] | None
    found: str
    fix: str


def is_given(recipe: Any, name: str) -> bool:
    """Return whether the setting has another value than its default."""
    return bool(getattr(recipe, name) != type(recipe).model_fields[name].default)


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
