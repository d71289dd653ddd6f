"""Read and write the records of a run: ``run.json`` and ``metrics.jsonl``."""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from kit import __version__, durable
from kit.checkpoint.manifest import ALL, verify
from kit.config.recipe import Recipe
from kit.errors import Problem, UserError, raise_if
from kit.model.locate import check_base
from kit.strategy.topology import ActualStrategy

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"


def read_run(run_file: Path) -> tuple[Recipe, ActualStrategy]:
    """Read ``run.json``: the recipe of the run, and the strategy it really had.

    Raises:
        UserError: the file is absent, damaged, or not a record of a run.
    """
    try:
        values = json.loads(run_file.read_text(encoding="utf-8"))
        return Recipe.model_validate(values["recipe"]), ActualStrategy.from_record(values["strategy"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"no record of a run ({type(error).__name__})"
        raise UserError(Problem(str(run_file), found, "the folder of a run, or what lies in it")) from None


def read_stop_tokens(run_file: Path) -> dict[str, int]:
    """Return the tokens that end answers of a run's data, with their ids; empty if ``run.json`` has none."""
    try:
        stops = json.loads(run_file.read_text(encoding="utf-8"))["data"]["stop_tokens"]
        return {str(token): int(id_) for token, id_ in stops.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # of an earlier version
        return {}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's ``metrics.jsonl``; empty if there is none. A line that a kill cut off is left out."""
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
    """Return ``recipe`` with the model, method and adapters of a run, and its chat template unless it sets one.

    Args:
        run_file: ``run.json`` of the run.
        base: the base model, if it is no longer where the run found it.

    Raises:
        UserError: ``run_file`` cannot be read, or the base cannot be opened.
    """
    keys = ["model_name_or_path", "model_revision", "method", "adapter_name_or_path", "freeze", "train_only"]
    keys += ["new_tokens", "trainable_tokens"]
    keys += [key for key in Recipe.model_fields if key.startswith(("lora_", "use_"))]
    trained, _ = read_run(run_file)
    own = {key: getattr(trained, key) for key in ("chat_template", "chat_template_kwargs")}
    values = ({} if recipe.chat_template else own) | recipe.model_dump(exclude_unset=True)
    opener = Recipe.model_validate(values | {key: getattr(trained, key) for key in keys})
    if base:
        return opener.model_copy(update={"model_name_or_path": base, "model_revision": None})
    fix = "a relative path counts from where the run was started"
    check_base(str(run_file), opener.model_name_or_path, opener.model_revision, fix)
    return opener


def recipe_of_checkpoint(path: Path, recipe: Recipe, where: str, base: str | None = None, part: slice = ALL) -> Recipe:
    """Call ``recipe_of_run`` for the run of a checkpoint. The result opens the model that fits its weights.

    Args:
        path: the checkpoint, in the output folder of its run.
        where: the field that names the checkpoint, for messages.
        part: which of its files to hash, as ``verify`` takes it.

    Raises:
        UserError: the checkpoint is damaged, is not in the folder of its run, or the base cannot be opened.
    """
    raise_if(Problem(where, f"{path}: {fault}") for fault in verify(path, part))
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
    """Return the versions of the kit and of the libraries that affect results; None for one not installed."""
    return {"kit": __version__, **{name: _version(name) for name in VERSIONED_PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``run.json`` atomically: after a crash it has the old content or the new content."""
    durable.write_text(folder / RUN_FILE, json.dumps(values, indent=1) + "\n")
