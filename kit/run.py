"""The output folder: whose it is, whether this command may go on in it, and ``run.json``.

Promises: nothing of another run is overwritten unless asked; the same command again continues the run.
"""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from kit import __version__
from kit.config import Recipe
from kit.errors import Problem, UserError, raise_if

# What makes a run another run. Everything else may change between two starts: output, logging, evaluation, batch
# shape, topology, and how far it goes.
IDENTITY = """
model_name_or_path model_revision method lora_r lora_alpha lora_dropout lora_target_modules use_rslora
use_dora adapter_name_or_path dataset_columns mixing streaming shuffle_buffer_size chat_template train_on max_length
excess_length_strategy packing global_batch_size optim learning_rate
lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm seed
""".split()

_PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
)
_PARTIAL = ".run.json.partial"
# All that a run leaves in its folder; `kit` is TensorBoard's.
_OWN = (
    "checkpoints",
    "final",
    ".final.partial",
    "metrics.jsonl",
    "metrics.partial",
    "report.html",
    ".report.partial",
    "kit",
    _PARTIAL,
    "run.json",
)


def identity(recipe: Recipe, data_fingerprint: str) -> dict[str, Any]:
    """The settings two starts must share to be one run."""
    values = recipe.model_dump(mode="json") | {"learning_rate": recipe.peak_learning_rate}
    return {**{key: values[key] for key in IDENTITY}, "data_fingerprint": data_fingerprint}


def check_output_dir(recipe: Recipe, data_fingerprint: str) -> int:
    """Refuse a folder that another run, or somebody's work, is in. Writes nothing.

    Returns:
        The steps after which the run in the folder finished; 0 if it did not, or is to be overwritten.

    Raises:
        UserError: with the settings that differ.
    """
    folder = Path(recipe.output_dir or "")
    parent = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    if not parent.is_dir():
        raise UserError(Problem("output_dir", f"{parent} is a file", "a folder"))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(Problem("output_dir", f"{parent} cannot be written to", fix="choose another --output_dir"))
    # A start that was killed before it had a run.json leaves no more than that file's beginning.
    if not folder.exists() or not {path.name for path in folder.iterdir()} - {_PARTIAL}:
        return 0
    # Only what this kit made is ever deleted.
    ways = "choose another --output_dir, or empty it yourself"
    try:
        old = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        old_identity, finished_steps = dict(old["identity"]), int(old["finished_steps"])
    except FileNotFoundError:
        raise UserError(Problem("output_dir", f"{folder} is not empty and holds no run", fix=ways)) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(Problem("output_dir", f"{folder}/run.json is no record of a run ({error})", fix=ways)) from None
    if recipe.overwrite_output_dir:
        raise_if(_inside(recipe, folder))
        return 0
    ways = "choose another --output_dir, or --overwrite_output_dir to delete it"
    new = identity(recipe, data_fingerprint)
    changed = [f"{key}: {old_identity.get(key)!r} -> {new[key]!r}" for key in new if old_identity.get(key) != new[key]]
    if old_identity.get("data_fingerprint") != data_fingerprint:
        was, now = old.get("recipe", {}).get("dataset"), recipe.model_dump(mode="json")["dataset"]
        changed[-1] = f"dataset: {was!r} -> {now!r}" if was != now else "the samples that dataset gives are others"
    if changed:
        raise UserError(Problem("output_dir", f"{folder} holds another run ({'; '.join(changed)})", fix=ways))
    if recipe.resume_from_checkpoint == "none":
        raise UserError(Problem("output_dir", f"{folder} holds this run already", fix=ways))
    return finished_steps


def _inside(recipe: Recipe, folder: Path) -> list[Problem]:
    """What the run reads and ``overwrite_output_dir`` would delete first."""
    keys = ("model_name_or_path", "adapter_name_or_path", "chat_template", "resume_from_checkpoint")
    paths = [(key, value) for key in keys if (value := getattr(recipe, key))]
    paths += [("dataset", entry.path) for entry in recipe.datasets]
    paths += [("eval_dataset", entry.path) for entry in recipe.eval_datasets]
    return [
        Problem(key, f"{value} lies in the output_dir that is to be overwritten", fix="choose another --output_dir")
        for key, value in paths
        if os.path.exists(value) and folder.resolve() in Path(value).resolve().parents
    ]


def check_start(recipe: Recipe, finished_steps: int, first_step: int, total_steps: int) -> None:
    """Whether going on after ``first_step`` makes sense. Raises ``UserError``."""
    ways = "choose another --output_dir, or --overwrite_output_dir to start again"
    if first_step > total_steps:
        found = f"{total_steps} steps wanted, and {first_step} are done"
        raise UserError(
            Problem("max_steps", found, "more steps, or --resume_from_checkpoint with an earlier one", ways)
        )
    if finished_steps and not first_step:
        found = f"{recipe.output_dir} holds a finished run of {finished_steps} steps and no checkpoint to go on from"
        raise UserError(Problem("output_dir", found, fix=ways))


def open_output_dir(recipe: Recipe) -> None:
    """Make the folder; with ``overwrite_output_dir`` without what an earlier run left. It may be a mount or a link.

    Main process only. Raises ``UserError`` if it cannot be made.
    """
    folder = Path(recipe.output_dir or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # run.json goes last: a kill in between leaves a folder that is still known as a run's.
        for name in _OWN if recipe.overwrite_output_dir else ():
            path = folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(Problem("output_dir", f"{folder}: {error.strerror or error}", "a folder to write to")) from None


def write_run_file(
    folder: Path,
    recipe: Recipe,
    recipe_name: str,
    strategy: dict[str, Any],
    data: dict[str, Any],
    finished_steps: int = 0,
    interrupted: int = 0,
) -> None:
    """``run.json``: the resolved recipe, the strategy as it really is, versions, data.

    ``finished_steps``: the steps after which ``final/`` was written; 0 while the run goes on.
    ``interrupted``: the steps after which a signal stopped the run; launchers hide the script's status.
    """
    values = {
        "recipe_name": recipe_name,
        "recipe": recipe.model_dump(mode="json"),
        "identity": identity(recipe, data["fingerprint"]),
        "strategy": strategy,
        "data": data,
        "versions": {"kit": __version__, **{name: _version(name) for name in _PACKAGES}},
        "finished_steps": finished_steps,
        "interrupted": interrupted,
    }
    temporary = folder / _PARTIAL
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / "run.json")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
