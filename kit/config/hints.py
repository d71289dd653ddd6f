"""What the user may have meant by a word that is wrong where it stands."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.fields import choices
from kit.config.optimisers import OTHER_NAMES
from kit.config.other_kits import hint_for_other_value, meaning, other_kits_word
from kit.config.recipe import RECIPES, Recipe
from kit.errors import Problem

METHODS = choices(Recipe.model_fields["method"].annotation)
OBJECTIVES = choices(Recipe.model_fields["objective"].annotation)
_OF_CONFIGS = ("mixed_precision", "compute_environment", "num_machines", "use_cpu", "fsdp_config", "deepspeed_config")


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
        return other_kits_word("loss_type", lower) if known and known.kind != "learns" else ""
    return hint_for_other_value(name, value)


def other_kind(values: Mapping[str, Any], flag: str, path: Path) -> Problem | None:
    """Return a problem if ``--recipe`` was given an Accelerate config, or ``--config`` a recipe.

    Args:
        values: of the file.
    """
    of_config, of_recipe = set(values) & set(_OF_CONFIGS), set(values) & set(Recipe.model_fields)
    if flag == "recipe" and of_config and not of_recipe:
        fix = f"--config {shlex.quote(str(path))} instead of --recipe"
        return Problem("--recipe", f"{path} is an Accelerate config", "a recipe", fix)
    if flag == "config" and of_recipe and not of_config:
        fix = f"--recipe {shlex.quote(str(path))} instead of --config"
        return Problem("--config", f"{path} is a recipe", "an Accelerate config", fix)
    return None


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, with each method of those that depend on it: ``llama-8b-lora``."""
    names = []
    for path in RECIPES.glob("*.yaml"):
        _, dependent, sections = path.read_text(encoding="utf-8", errors="replace").partition("\nby_method:\n")
        methods = re.findall(rf"^  ({'|'.join(METHODS)}):", sections, re.MULTILINE)
        names += [f"{path.stem}-{method}" for method in methods] if dependent else [path.stem]
    return sorted(names)
