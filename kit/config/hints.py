"""Guess what the user meant by a word that is wrong where it stands: by its meaning first, then by its spelling."""

import math
import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.dataset_entry import DATA_SUFFIXES
from kit.config.fields import choices
from kit.config.optimisers import optimiser_of_other_kits
from kit.config.other_kits import objective_of_other_kits, other_kits_word
from kit.config.other_words import INITIALISATIONS
from kit.config.recipe import ACCELERATE_CONFIGS, RECIPES, Recipe
from kit.durable import read_small
from kit.errors import Problem, did_you_mean

METHODS = choices(Recipe.model_fields["method"].annotation)
OBJECTIVES = choices(Recipe.model_fields["objective"].annotation)
_FLASH = re.compile(r"(?:fa|flash_?attn|flash_?attention)[_-]?([23])?")  # as other kits shorten it
_OF_CONFIGS = ("mixed_precision", "compute_environment", "num_machines", "use_cpu", "fsdp_config", "deepspeed_config")


def hint_for_file(name: str, flag: str) -> str:
    """Return a hint for a file that ``--recipe`` or ``--config`` does not find: another flag, or the nearest names."""
    recipes, configs = recipe_names(), _names(ACCELERATE_CONFIGS)
    stem = re.sub(r"\.ya?ml$", "", Path(name).name)
    if flag == "config":
        others = {"method": METHODS, "objective": OBJECTIVES, "recipe": recipes}
        return _other_flag(stem, flag, others) or did_you_mean(stem, configs)
    rest, _, last = stem.rpartition("-")
    if last in OBJECTIVES and rest:  # llama-8b-dpo
        known = rest if rest in [*recipes, *_names(RECIPES)] else ""
        return f"--recipe {known} --objective {last}" if known else hint_for_file(rest, flag)
    others = {"config": configs, "objective": OBJECTIVES}
    return _other_flag(stem, flag, others) or _nearest_recipes(stem, recipes) or did_you_mean(stem, recipes)


def hint_for_word(word: str) -> str:
    """Return the flag that a word without a flag seems to belong to, with the word: ``--recipe tiny``."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        keys = re.findall(r"^(\w+) *:", read_small(path, errors="replace"), re.MULTILINE) if path.is_file() else []
        is_config = other_kind(dict.fromkeys(keys), "recipe", path)
        return f"--{'config' if is_config else 'recipe'} {shlex.quote(word)}"
    if word.lower().endswith(DATA_SUFFIXES):
        return f"--dataset {shlex.quote(word)}"
    if path.is_dir():
        kinds = {"adapter_config.json": "adapter_name_or_path", "config.json": "model_name_or_path"}
        flag = next((flag for file, flag in kinds.items() if (path / file).is_file()), "dataset")
        return f"--{flag} {shlex.quote(word)}"
    names = {
        "recipe": recipe_names(),
        "config": _names(ACCELERATE_CONFIGS),
        "method": METHODS,
        "objective": OBJECTIVES,
    }
    return next((f"--{flag} {word}" for flag, known in names.items() if word in known), "")


def hint_for_value(name: str, value: str) -> str:
    """Return a hint for a value that a setting does not have, if another setting has it, or another kit."""
    if name == "objective":
        return _other_flag(value, name, {"method": METHODS}) or objective_of_other_kits(value)
    if name == "dpo_loss":
        return _other_flag(value, name, {"objective": OBJECTIVES}) or objective_of_other_kits(value)
    if name == "optim":
        return optimiser_of_other_kits(value)
    if name == "init_lora_weights":
        return INITIALISATIONS.get(re.sub(r"_niter_.*", "", value.strip().lower()), "")
    if name == "report_to":
        answers = (other_kits_word(word.strip()) for word in value.lower().split(","))
        return next((answer for answer in answers if answer.startswith("not offered")), "")
    if name == "attn_implementation" and (short := _FLASH.fullmatch(value.strip().lower())):
        return f"did you mean 'flash_attention_{short[1] or 2}'?"
    if name != "method":
        return ""
    if value.strip().lower() in ADAPTER_TYPES:
        return f"--method lora --adapter_type {value.strip().lower()}"
    return _other_flag(value, name, {"objective": OBJECTIVES})


def other_kind(values: Mapping[str, Any], flag: str, path: Path) -> Problem | None:
    """Return a problem if ``--recipe`` was given an Accelerate config, or ``--config`` a recipe.

    Args:
        values: of the file.
    """
    of_config, of_recipe = set(values) & set(_OF_CONFIGS), set(values) & set(Recipe.model_fields)
    if flag == "recipe" and of_config and not of_recipe:
        return Problem("--recipe", f"{path} is an Accelerate config", "a recipe", _instead(str(path), flag, "config"))
    if flag == "config" and of_recipe and not of_config:
        return Problem("--config", f"{path} is a recipe", "an Accelerate config", _instead(str(path), flag, "recipe"))
    return None


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, with each method of those that depend on it: ``llama-8b-lora``."""
    names = []
    for path in RECIPES.glob("*.yaml"):
        _, dependent, sections = path.read_text(encoding="utf-8", errors="replace").partition("\nby_method:\n")
        methods = re.findall(rf"^  ({'|'.join(METHODS)}):", sections, re.MULTILINE)
        names += [f"{path.stem}-{method}" for method in methods] if dependent else [path.stem]
    return sorted(names)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _other_flag(word: str, flag: str, names: Mapping[str, list[str]]) -> str:
    return next((_instead(word, flag, other) for other, known in names.items() if word in known), "")


def _instead(word: str, flag: str, other: str) -> str:
    return f"--{other} {shlex.quote(word)} instead of --{flag}"


def _nearest_recipes(name: str, recipes: list[str]) -> str:
    """A hint to the recipes of the method that ``name`` mentions, if any, and of the nearest number of parameters."""
    size, methods = _size(name), [method for method in METHODS if method in re.split(r"[-_]", name.lower())]
    near = {recipe: _size(recipe) for recipe in recipes if not methods or recipe.rpartition("-")[2] in methods}
    far = {recipe: abs(math.log(each / size)) if size else 0.0 for recipe, each in near.items() if each}
    best = [recipe for recipe, distance in far.items() if distance == min(far.values())]
    if not best or not (size or methods):
        return ""
    best = get_close_matches(name, best, n=1, cutoff=0.9) or best  # a slip of the finger
    return f"did you mean {best[0]!r}?" if len(best) == 1 else f"did you mean one of {', '.join(best)}?"


def _size(name: str) -> float:
    """The billions of parameters that a name mentions; 0 if it mentions none."""
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower().replace("_", "-"))
    return float(found[1]) / {"b": 1, "m": 1000}[found[2]] if found else 0.0
