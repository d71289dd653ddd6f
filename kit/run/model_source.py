"""How to open the result of a run: its folder, ``final/``, an adapter or a checkpoint."""

import os
from pathlib import Path
from typing import get_args

from kit.checkpoint.manifest import MANIFEST, NONE
from kit.config.recipe import Recipe
from kit.config.settings.objective import ObjectiveSettings
from kit.model.pretrained.locate import check_base
from kit.run.record import RUN_FILE, as_trained, read_run, with_model_of_checkpoint
from kit.strategy.topology import Precision
from kit.system.console import is_main, show_error
from kit.system.errors import UserError

CHECKPOINT = "model_name_or_path"  # the flag that may name one


def to_open(recipe: Recipe) -> tuple[Recipe, Path | None]:
    """Find out what ``model_name_or_path`` is, and how to open it.

    Returns:
        The recipe that opens it, ``as_trained`` if it is of a run; and the checkpoint to load into that model, None if
        it is not a checkpoint. Of its files only the names, the sizes and the state are checked.
    """
    model = Path(os.path.realpath(os.path.expanduser(recipe.model_name_or_path)))
    adapter = Path(os.path.realpath(os.path.expanduser(recipe.adapter_name_or_path or model)))
    is_checkpoint = os.path.isfile(model / MANIFEST)
    if (is_checkpoint or os.path.isfile(model / "adapter_config.json")) and recipe.adapter_name_or_path:
        raise UserError("adapter_name_or_path", f"{model} brings its own weights", "a base model with it")
    run_file = run_of(str(adapter)) or run_of(str(model))
    if is_checkpoint:
        recipe = with_model_of_checkpoint(recipe, model, CHECKPOINT, part=NONE)
    elif not recipe.adapter_name_or_path:
        recipe = recipe.model_copy(update={"method": "full"})
    elif recipe.method == "full":
        recipe = recipe.model_copy(update={"method": "lora"})
    if run_file:
        run = read_run(run_file)[0]
        recipe = as_trained(recipe, run)
        if run.has_tools and not recipe.has_tools and is_main():
            show_error("note: the run had tools; they are code, so only --tools and --environment name them")
        if not is_checkpoint:  # in final/
            recipe = recipe.model_copy(
                update={"new_tokens": None, "trainable_tokens": None, "lora_modules_to_save": None}
            )
    return recipe, model if is_checkpoint else None


def precision_of(path: str, given: Precision) -> Precision:
    """Return the precision of the run in whose folder ``path`` lies; ``given`` if it is in none."""
    run_file = run_of(path)
    if run_file is None:
        return given
    found = read_run(run_file)[1].mixed_precision
    return found if found in get_args(Precision) else "no"  # type: ignore[return-value]


def reference_of(scored: str, settings: ObjectiveSettings, method: str) -> Recipe | None:
    """Return the recipe that opens the reference model of a run with this objective, if that is another model.

    It is the model or the adapter with which the run started; None for a new adapter, whose reference is its base.

    Args:
        scored: may be ``final/`` or a checkpoint of that run.
        method: of ``scored``.

    Raises:
        UserError: ``scored`` is a full model outside a folder of such a run; or the initial model no longer exists.
    """
    if not settings.declared.has_reference:
        return None
    run_file = run_of(scored)
    run = read_run(run_file)[0] if run_file else None
    if run and (run.method == "full" or (run.declared.has_reference and run.adapter_name_or_path)):
        fix = "a relative path counts from where the run was started"
        check_base(str(run_file), run.model_name_or_path, run.model_revision, fix)
        return run
    if method == "full":
        found = f"{settings.objective} needs the reference model, which is not known for {scored}, a full model"
        fix = "--objective simpo needs no reference model; or score it in the folder of its run"
        raise UserError("objective", found, fix=fix)
    return None


def run_of(path: str) -> Path | None:
    """Return ``run.json`` of the run in whose folder ``path`` lies as ``final/`` or a checkpoint; None for others."""
    opened = Path(os.path.realpath(os.path.expanduser(path)))
    folders = {"final": opened.parent, "checkpoints": opened.parent.parent}
    folder = folders.get("final" if opened.name == "final" else opened.parent.name)
    return folder / RUN_FILE if folder and (folder / RUN_FILE).is_file() else None
