"""What a path opens that names the result of a run: its folder, ``final/``, an adapter or a checkpoint."""

import os
from pathlib import Path

from kit.checkpoint.manifest import MANIFEST, NONE
from kit.config.recipe import Recipe
from kit.errors import Problem, UserError
from kit.run.record import RUN_FILE, read_run, with_model_of_checkpoint, with_template_of_run
from kit.strategy.topology import Precision

CHECKPOINT = "model_name_or_path"  # the flag that may name one


def to_open(recipe: Recipe) -> tuple[Recipe, Path | None]:
    """Find out what ``model_name_or_path`` is, and how to open it.

    Returns:
        The recipe that opens it; and the checkpoint to load into that model, None if it is not a checkpoint. Of its
        files only the names, the sizes and the state are checked.
    """
    model = Path(os.path.realpath(os.path.expanduser(recipe.model_name_or_path)))
    adapter = Path(os.path.realpath(os.path.expanduser(recipe.adapter_name_or_path or model)))
    is_checkpoint = os.path.isfile(model / MANIFEST)
    runs = [each.parent / RUN_FILE for each in (adapter, model) if each.name == "final"]
    if run_file := next(filter(os.path.isfile, runs), None):
        recipe = with_template_of_run(recipe, run_file)
        in_final = {"new_tokens": None, "trainable_tokens": None, "lora_modules_to_save": None}
        recipe = recipe.model_copy(update=in_final)
    if (is_checkpoint or os.path.isfile(model / "adapter_config.json")) and recipe.adapter_name_or_path:
        raise UserError(Problem("adapter_name_or_path", f"{model} brings its own weights", "a base model with it"))
    if is_checkpoint:
        recipe = with_model_of_checkpoint(recipe, model, CHECKPOINT, part=NONE)
        return with_template_of_run(recipe, model.parents[1] / RUN_FILE), model
    if not recipe.adapter_name_or_path:
        method = "full"
    else:
        method = "qlora" if recipe.method == "qlora" else "lora"
    return recipe.model_copy(update={"method": method}), None


def otherwise_than_trained(scored: str, recipe: Recipe, precision: Precision) -> list[str]:
    """Return lines that say what the run computed with, where this process computes with something else.

    Args:
        scored: the path that is opened, see ``run_of``.
        recipe: opens it, see ``to_open``.
        precision: of this process.
    """
    run_file = run_of(scored)
    if run_file is None:
        return []
    run, strategy = read_run(run_file)
    lines = []
    if strategy.mixed_precision != precision:
        names = {"no": "float32", "bf16": "bf16"}
        found = f"the run computed in {names[strategy.mixed_precision]}, and here it is {names[precision]}"
        config = "--config single, or another with " if precision == "no" else "a config with "
        lines += [f"note: {found}: {config}mixed_precision: {strategy.mixed_precision}, computes as trained"]
    if run.method == "qlora" and recipe.method == "lora":
        lines += ["note: the run had its base in 4 bits, and here it is as it was: --method qlora computes as trained"]
    if run.qat and not recipe.qat:
        group = f" --qat_group_size {run.qat_group_size}" if run.qat_group_size else ""
        flag = f"--qat {run.qat}{group}"
        lines += [f"note: the run rounded weights, and here they are as in the files: {flag} computes as trained"]
    return lines


def first_adapter(scored: str) -> str | None:
    """Return the adapter that a preference run began with, its reference; None for new adapters and other models.

    Args:
        scored: may be ``final/`` or a checkpoint of that run.
    """
    run_file = run_of(scored)
    if run_file is None:
        return None
    run, _ = read_run(run_file)
    return run.adapter_name_or_path if run.declared.has_reference else None


def run_of(path: str) -> Path | None:
    """Return ``run.json`` of the run in whose folder ``path`` lies as ``final/`` or a checkpoint; None for others."""
    opened = Path(os.path.realpath(os.path.expanduser(path)))
    folders = {"final": opened.parent, "checkpoints": opened.parent.parent}
    folder = folders.get("final" if opened.name == "final" else opened.parent.name)
    return folder / RUN_FILE if folder and (folder / RUN_FILE).is_file() else None
