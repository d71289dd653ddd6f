"""Suggestions for a wrong value: what the user may have meant."""

import re

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.optimisers import OTHER_NAMES
from kit.config.other_kits import hint_for_other_key, hint_for_other_value, meaning
from kit.config.paths import RECIPES
from kit.config.recipe import Recipe
from kit.schema.fields import choices

METHODS = choices(Recipe.model_fields["method"].annotation)
OBJECTIVES = choices(Recipe.model_fields["objective"].annotation)


def hint_for_value(name: str, value: str) -> str:
    """Return a hint for a value that a setting does not have, if another setting has it, or another kit."""
    lower = value.strip().lower()
    if name == "optim" and lower in OTHER_NAMES:
        return f"use {OTHER_NAMES[lower]}"
    if name == "report_to":
        return next(filter(None, (hint_for_other_value(name, word) for word in value.split(","))), "")
    if name == "method" and lower in ADAPTER_TYPES:
        return f"--method lora --adapter_type {lower}"
    if name in ("objective", "dpo_loss"):
        known = meaning("loss_type", lower)
        return hint_for_other_key("loss_type", lower) if known and known.kind != "training" else ""
    return hint_for_other_value(name, value)


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, with each method of those that depend on it: ``llama-8b-lora``."""
    names = []
    for path in RECIPES.glob("*.yaml"):
        _, dependent, sections = path.read_text(encoding="utf-8", errors="replace").partition("\nby_method:\n")
        methods = re.findall(rf"^  ({'|'.join(METHODS)}):", sections, re.MULTILINE)
        names += [f"{path.stem}-{method}" for method in methods] if dependent else [path.stem]
    return sorted(names)
