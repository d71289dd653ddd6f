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
from kit.errors import Problem, UserError

# What makes a run another run. Everything else may change between two starts: output, logging, evaluation, batch
# shape, topology, and how far it goes.
IDENTITY = """
model_name_or_path model_revision method lora_r lora_alpha lora_dropout lora_target_modules use_rslora
use_dora adapter_name_or_path dataset_columns chat_template max_length global_batch_size optim learning_rate
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


def identity(recipe: Recipe, data_fingerprint: str) -> dict[str, Any]:
    """The settings two starts must share to be one run."""
    values = recipe.model_dump(mode="json") | {"learning_rate": recipe.peak_learning_rate}
    return {**{key: values[key] for key in IDENTITY}, "data_fingerprint": data_fingerprint}


def check_output_dir(recipe: Recipe, data_fingerprint: str) -> None:
    """Refuse a folder that another run, or somebody's work, is in. Writes nothing.

    Raises:
        UserError: with the settings that differ.
    """
    folder = Path(recipe.output_dir or "")
    parent = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    if not parent.is_dir():
        raise UserError(Problem("output_dir", f"{parent} is a file", "a folder"))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(Problem("output_dir", f"{parent} cannot be written to", fix="choose another --output_dir"))
    if not folder.exists() or not any(folder.iterdir()):
        return
    # Only what this kit made is ever deleted.
    ways = "choose another --output_dir, or empty it yourself"
    try:
        old = dict(json.loads((folder / "run.json").read_text(encoding="utf-8"))["identity"])
    except FileNotFoundError:
        raise UserError(Problem("output_dir", f"{folder} is not empty and holds no run", fix=ways)) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(Problem("output_dir", f"{folder}/run.json is no record of a run ({error})", fix=ways)) from None
    if recipe.overwrite_output_dir:
        return
    ways = "choose another --output_dir, or --overwrite_output_dir to delete it"
    new = identity(recipe, data_fingerprint)
    changed = [f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise UserError(Problem("output_dir", f"{folder} holds another run ({'; '.join(changed)})", fix=ways))
    if recipe.resume_from_checkpoint == "none":
        raise UserError(Problem("output_dir", f"{folder} holds this run already", fix=ways))


def open_output_dir(recipe: Recipe, is_main_process: bool) -> Path:
    """Make the folder; with ``overwrite_output_dir`` without what the earlier run left. It may be a mount or a link."""
    folder = Path(recipe.output_dir or "")
    if is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir() if recipe.overwrite_output_dir else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return folder


def write_run_file(
    folder: Path,
    recipe: Recipe,
    recipe_name: str,
    strategy: dict[str, Any],
    data: dict[str, Any],
    **more: Any,
) -> None:
    """``run.json``: the resolved recipe, the strategy as it really is, versions, data."""
    values = {
        "recipe_name": recipe_name,
        "recipe": recipe.model_dump(mode="json"),
        "identity": identity(recipe, data["fingerprint"]),
        "strategy": strategy,
        "data": data,
        "versions": {"kit": __version__, **{name: _version(name) for name in _PACKAGES}},
        **more,
    }
    temporary = folder / ".run.json.partial"
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / "run.json")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
