"""What a run leaves for others to read: ``run.json`` and ``metrics.jsonl``."""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from kit import __version__, durable
from kit.checkpoint.manifest import verify
from kit.config.recipe import Recipe
from kit.errors import Problem, UserError, raise_if
from kit.model.locate import check_base
from kit.strategy.topology import ActualStrategy

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"


def read_run(run_file: Path) -> tuple[Recipe, ActualStrategy]:
    """The recipe of the run that wrote ``run.json``, and the strategy it really had. Raises ``UserError``."""
    try:
        values = json.loads(run_file.read_text(encoding="utf-8"))
        return Recipe.model_validate(values["recipe"]), ActualStrategy.from_record(values["strategy"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"no record of a run ({type(error).__name__})"
        raise UserError(Problem(str(run_file), found, "the folder of a run, or what lies in it")) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's ``metrics.jsonl``, if there is one; a kill may have cut the last one off."""
    rows = []
    try:
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    return rows


def recipe_of_run(recipe: Recipe, run_file: Path, base: str | None = None) -> Recipe:
    """``recipe`` with the model, method and adapters of the run that wrote ``run.json``, and with its chat template
    unless ``recipe`` sets one. ``base`` is opened where the run's own has moved. Raises ``UserError``."""
    keys = ["model_name_or_path", "model_revision", "method", "adapter_name_or_path"]
    keys += [key for key in Recipe.model_fields if key.startswith(("lora_", "use_"))]
    trained, _ = read_run(run_file)
    values = {"chat_template": trained.chat_template, **recipe.model_dump(exclude_unset=True)}
    opener = Recipe.model_validate(values | {key: getattr(trained, key) for key in keys})
    if base:
        return opener.model_copy(update={"model_name_or_path": base, "model_revision": None})
    fix = "a relative path counts from where the run was started"
    check_base(str(run_file), opener.model_name_or_path, opener.model_revision, fix)
    return opener


def recipe_of_checkpoint(path: Path, recipe: Recipe, where: str, base: str | None = None) -> Recipe:
    """``recipe_of_run`` of the run that a checkpoint is of: it opens the model that the checkpoint's weights fit.

    Raises:
        UserError: the checkpoint is broken (at ``where``), or not in the folder of its run.
    """
    raise_if(Problem(where, f"{path}: {fault}") for fault in verify(path))
    return recipe_of_run(recipe, path.parent.parent / RUN_FILE, base)


VERSIONED_PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
)


def versions() -> dict[str, str | None]:
    """The versions of the kit and of the libraries that may change a number; None for one that is not installed."""
    return {"kit": __version__, **{name: _version(name) for name in VERSIONED_PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``run.json``: the old content or the new one is there, never a part."""
    durable.write_text(folder / RUN_FILE, json.dumps(values, indent=1) + "\n")
