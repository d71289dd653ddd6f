"""Conflicts between settings, and settings without effect. Needs only the recipe."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from kit.config.recipe import Recipe
from kit.config.settings import data, evaluation, method, model, objective, optimisation, output
from kit.schema.rules import is_given
from kit.system.errors import Problem

GROUPS = (optimisation, data, objective, output, evaluation, method, model)
RULES = tuple(chain.from_iterable(each.RULES for each in GROUPS))


def find_conflicts(recipe: Recipe, where: Mapping[str, str], left_out: set[str]) -> Iterator[Problem]:
    """Return a problem for each rule that ``recipe`` breaks.

    Args:
        where: what to call each key in a message, such as ``file:line key``.
        left_out: keys that are wrong by themselves; a rule in which one takes part is not asked.
    """

    for rule in (*RULES, *recipe.declared.rules):
        keys = rule.keys.split()
        if left_out.intersection(keys):
            continue
        if it := rule.broken(recipe) if rule.broken else all(getattr(recipe, key) for key in keys):
            yield Problem(where.get(keys[0], keys[0]), rule.found.format(r=recipe, it=it), fix=rule.fix)


def describe_unused(recipe: Recipe) -> list[str]:
    """Return lines that name the settings which were given and have no effect without another; none if all have one.

    They are not refused: a recipe may hold them for another method, or for another dataset.
    """
    unused: dict[str, list[str]] = {}
    info: Any
    for name, info in Recipe.model_fields.items():
        if name in recipe.model_fields_set and is_given(recipe, name):
            for needs in filter(None, info.json_schema_extra["needs"].split(" and ")):
                others = [part.partition(" ") for part in needs.split(" or ")]
                if not any(
                    str(getattr(recipe, other)).lower() == value if value else getattr(recipe, other)
                    for other, _, value in others
                ):
                    unused.setdefault(needs, []).append(name)
    return [f"note: no effect without {needs}: {', '.join(names)}" for needs, names in unused.items()]
