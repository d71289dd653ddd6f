"""The output folder: whose it is, whether this command may go on in it, and ``run.json``.

Promises: nothing of another run is overwritten unless asked; the same command again continues the run; one process
at a time runs in a folder.
"""

import json
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kit import __version__, durable, lock
from kit.checkpoint.load import list_checkpoints
from kit.config.recipe import Recipe
from kit.errors import Problem, UserError, raise_if
from kit.failures import exits

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
# All that a run leaves in its folder besides run.json; `kit` is TensorBoard's.
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
)


def identity(recipe: Recipe, data_fingerprint: str, model_fingerprint: str) -> dict[str, Any]:
    """The settings, data and base model two starts must share to be one run."""
    values = recipe.model_dump(mode="json") | {"learning_rate": recipe.peak_learning_rate}
    fingerprints = {"model_fingerprint": model_fingerprint, "data_fingerprint": data_fingerprint}
    return {**{key: values[key] for key in IDENTITY}, **fingerprints}


def check_output_dir(recipe: Recipe, identity: Mapping[str, Any]) -> int:
    """Refuse a folder that another run, or somebody's work, is in. Writes nothing.

    Returns:
        The steps after which the run in the folder finished; 0 if it did not, or is to be overwritten.

    Raises:
        UserError: with the settings that differ, or who is at work there.
    """
    folder = Path(recipe.output_dir or "")
    parent = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    if not parent.is_dir():
        raise UserError(Problem("output_dir", f"{parent} is a file", "a folder"))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(Problem("output_dir", f"{parent} cannot be written to", fix="choose another --output_dir"))
    # A start that was killed before it had a run.json leaves no more than that file's beginning.
    if not folder.exists() or not {path.name for path in folder.iterdir()} - {_PARTIAL, lock.NAME}:
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
    lock.look(folder)
    if recipe.overwrite_output_dir:
        raise_if(_inside(recipe, folder))
        return 0
    ways = "choose another --output_dir, or --overwrite_output_dir to delete it"
    if changed := differences(old_identity, identity):
        was, now = old.get("recipe", {}).get("dataset"), recipe.model_dump(mode="json")["dataset"]
        if was != now:
            changed = [f"dataset: {was!r} -> {now!r}" if text == OTHER_DATA else text for text in changed]
        raise UserError(Problem("output_dir", f"{folder} holds another run ({'; '.join(changed)})", fix=ways))
    if recipe.resume_from_checkpoint == "none":
        raise UserError(Problem("output_dir", f"{folder} holds this run already", fix=ways))
    return finished_steps


def check_checkpoint(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another run; ``old`` and ``new`` as ``identity`` gives them.

    Raises:
        UserError: with the settings that differ.
    """
    if changed := differences(old, new):
        found = f"{path} is of another run ({'; '.join(changed)})"
        fix = "to start a new run from its weights, export them: python recipes/export.py"
        raise UserError(Problem("resume_from_checkpoint", found, "a checkpoint of a run with these settings", fix))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not as it was when a checkpoint was written, and gives other roundings from there on, in words.

    Both as a manifest has them: ``strategy`` and ``versions``.
    """
    keys = ("type", "num_processes", "mixed_precision", "device", "num_threads")
    pairs = [(key, old.get("strategy", {}).get(key), new["strategy"][key]) for key in keys]
    pairs += [(name, old.get("versions", {}).get(name), new["versions"][name]) for name in _PACKAGES]
    changed = ", ".join(f"{name} {was} -> {now}" for name, was, now in pairs if was != now)
    return [f"note: changed since that checkpoint: {changed}; steps from here on round differently"] if changed else []


OTHER_DATA = "the samples that dataset gives are others"
OTHER_MODEL = "the weights at model_name_or_path are others"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What makes two identities two runs, in words."""
    words = {"data_fingerprint": OTHER_DATA, "model_fingerprint": OTHER_MODEL}
    changed = [key for key in new if old.get(key) != new[key]]
    if "model_name_or_path" in changed and "model_fingerprint" in changed:
        changed.remove("model_fingerprint")
    return [words.get(key) or f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in changed]


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
    ways = "raise it, or choose another --output_dir, or --overwrite_output_dir to start again"
    if first_step > total_steps:
        found = f"{total_steps} steps wanted, and {first_step} are done"
        raise UserError(
            Problem("max_steps", found, f"at least {first_step}, or --resume_from_checkpoint with an earlier one", ways)
        )
    if finished_steps and not first_step:
        found = f"{recipe.output_dir} holds a finished run of {finished_steps} steps and no checkpoint to go on from"
        raise UserError(Problem("output_dir", found, fix=ways))


def snapshot(folder: Path) -> list[str]:
    """What runs have left in a folder so far; another one when another run has been at work in it."""
    try:
        record = (folder / "run.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        record = ""
    return [record, *(path.name for path in list_checkpoints(folder / "checkpoints"))]


def wanted_checkpoint(recipe: Recipe) -> str:
    """Where to go on from: ``auto``, ``none`` or a path, as the recipe says, but what was obeyed is not done twice.

    The same command again, with a path, must go on from the newest checkpoint that came after it.
    """
    folder, wanted = Path(recipe.output_dir or ""), recipe.resume_from_checkpoint
    if recipe.overwrite_output_dir:  # a folder that is about to be emptied has nothing to go on from
        return "none" if wanted == "auto" else wanted
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        is_obeyed = record["recipe"]["resume_from_checkpoint"] == wanted
    except (OSError, ValueError, KeyError, TypeError):
        return wanted
    return "auto" if is_obeyed and list_checkpoints(folder / "checkpoints") else wanted


def open_output_dir(recipe: Recipe, identity: Mapping[str, Any], seen: list[str]) -> list[str]:
    """Make the folder and lock it until this process ends; with ``overwrite_output_dir`` without what an earlier run
    left. It may be a mount or a link. Main process only.

    Args:
        seen: the ``snapshot`` that all decisions were made on.

    Returns:
        What the user should know of who had the folder before.

    Raises:
        UserError: it cannot be made, or another run is at work in it.
    """
    folder = Path(recipe.output_dir or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        notes = lock.take(folder)
        exits.finish_first(lock.sign_off)
        if snapshot(folder) != seen:
            found = f"another run was at work in {folder} while this one started"
            raise UserError(Problem("output_dir", found, fix="type the same command again"))
        if recipe.overwrite_output_dir and seen[0]:
            # First the record: a kill after it leaves a folder that is known as this run's.
            record = {"recipe": recipe.model_dump(mode="json"), "identity": identity}
            _write_record(folder, {**record, "finished_steps": 0, "interrupted": None})
            for name in _OWN:
                path = folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        if seen == seen[:1] and seen[0] and recipe.resume_from_checkpoint == "auto" and not recipe.overwrite_output_dir:
            notes.append(f"{folder} holds this run and no checkpoint: it begins again from the first step")
        lock.sign(folder, emptied=recipe.overwrite_output_dir)
    except OSError as error:
        raise UserError(Problem("output_dir", f"{folder}: {error.strerror or error}", "a folder to write to")) from None
    return notes


def write_run_file(
    folder: Path,
    recipe: Recipe,
    recipe_name: str,
    about: Mapping[str, Any],
    data: dict[str, Any],
    finished_steps: int = 0,
    interrupted: int | None = None,
) -> None:
    """``run.json``: the resolved recipe, the strategy as it really is, versions, data.

    ``about``: what each checkpoint says too: ``identity``, ``strategy``, ``versions``.
    ``finished_steps``: the steps after which ``final/`` was written; 0 while the run goes on.
    ``interrupted``: the steps after which a signal stopped the run, else None; launchers hide the script's status.
    """
    values = {
        "recipe_name": recipe_name,
        "recipe": recipe.model_dump(mode="json"),
        **about,
        "data": data,
        "finished_steps": finished_steps,
        "interrupted": interrupted,
    }
    _write_record(folder, values)


def _write_record(folder: Path, values: Mapping[str, Any]) -> None:
    durable.write_text(folder / "run.json", json.dumps(values, indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """Of the kit and of the libraries whose numbers may differ."""
    return {"kit": __version__, **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
