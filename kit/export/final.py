"""Write models that plain ``from_pretrained`` opens: ``final/`` of a run, an exported checkpoint, a merged adapter.

A folder has a full model or a PEFT adapter, with tokenizer, chat template and model card. It is written under a
temporary name and then renamed, so it is complete or absent.
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from kit import durable
from kit.config.recipe import Recipe
from kit.data.chat.template import resolve_template
from kit.errors import Problem, TrainingError, UserError, raise_if
from kit.export.shards import write_weights
from kit.model.adapter import attach_adapter
from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.run.record import read_run
from kit.strategy.topology import ActualStrategy
from kit.strategy.weights import gather_trainable, rank_and_world, whole_state
from kit.train.loop_state import LoopState

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

# Reads a checkpoint's weights into a model, and returns them by their names in it (``read_weights`` with its path).
Read = Callable[[Any], dict[str, torch.Tensor]]


def save_final(prepared: "Prepared", tokenizer: Any, folder: Path, card: str, dtype: torch.dtype | None) -> None:
    """Write ``folder`` as ``write_model`` does, under every strategy. Called by all ranks.

    ``folder`` is replaced by one rename. The arguments ``tokenizer``, ``card`` and ``dtype`` are those of
    ``write_model``.

    Raises:
        TrainingError: on the main process, if the adapter has learned nothing.
    """
    accelerator, model = prepared.accelerator, prepared.model
    plain = accelerator.unwrap_model(model)
    staging = folder.with_name(f".{folder.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    accelerator.wait_for_everyone()
    state = gather_trainable(accelerator, model) if hasattr(plain, "peft_config") else whole_state(model)
    write_model(staging, plain, state, tokenizer, card, dtype)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        durable.sync_tree(staging)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
        durable.sync(folder.parent)
    accelerator.wait_for_everyone()


def write_model(
    folder: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any, card: str, dtype: torch.dtype | None
) -> None:
    """Fill ``folder`` with a full model, or with an adapter if ``model`` has one. Called by all ranks.

    Args:
        model: decides what is written. If it has an adapter, its weights are not read, and it may be on meta.
        state: by names in ``model``: of an adapter the whole trainable tensors, on the main process; of a full model
            all parameters and persistent buffers, sharded if it is.
        card: text of the model card.
        dtype: dtype of a full model's weights; None: float32. Adapters stay in float32, in which they were trained.

    Raises:
        TrainingError: all second matrices (lora_B) of the adapter are zero, so nothing was trained.
    """
    is_main = rank_and_world()[0] == 0
    if not hasattr(model, "peft_config"):
        config, before = model.config, (model.config.use_cache, model.config.dtype)
        config.use_cache = True
        if is_main:
            model.save_pretrained(folder, state_dict={})  # all but the weights
        write_weights(folder, model, state, dtype or torch.float32)
        if is_main:
            config.dtype = dtype or torch.float32  # `save_pretrained` puts that of the weights in training there
            config.save_pretrained(folder)
        config.use_cache, config.dtype = before
    elif is_main:
        _refuse_untrained(state)
        # Rows that train are in ``state``; peft would look for the base, and add what it takes for more of them.
        twin = _unwrapped_twin(model)
        twin.save_pretrained(folder, state_dict=_with_tied(twin, state), save_embedding_layers=False)
    if is_main:
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _share_as_usual(folder)


def _share_as_usual(folder: Path) -> None:
    """Give weight files the mode of any new file in ``folder``; safetensors makes them readable by the owner only."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # a disk without modes must not make the save fail
            path.chmod(mode)


def _unwrapped_twin(model: Any) -> Any:
    """The same adapted model on meta and without wrappers, because peft derives the saved names from its modules."""
    from peft import get_peft_model

    with torch.device("meta"):
        base = type(model.get_base_model())(model.get_base_model().config)
    return get_peft_model(base, copy.deepcopy(model.peft_config["default"]))


def _with_tied(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the other names of tied parameters, which peft expects too."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    same = {name: state[first] for first, *others in names.values() if first in state for name in others}
    return state | same


def export_checkpoint(
    recipe: Recipe, run_file: Path, state: LoopState, read: Read, output_dir: Path, dtype: str | None
) -> None:
    """Write a checkpoint as a model folder: what ``final/`` would be after its step. Runs in one process.

    Args:
        recipe: opens the model of the run, see ``recipe_of_run``.
        run_file: ``run.json`` of the run, for the card.
        state: the state of the loop in the checkpoint.
        read: reads the checkpoint's weights.
        output_dir: new folder for the model.
        dtype: dtype of a full model's weights; None: that of its base.

    Raises:
        UserError: the base cannot be opened or does not fit the checkpoint, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    run, strategy = read_run(run_file)
    run = run.model_copy(update={"model_name_or_path": recipe.model_name_or_path})  # it may have moved
    metrics = state.last_evaluation if state.evaluated_step == state.step else {}
    card = model_card(run, strategy, metrics, state.step)
    tokenizer, config, model = _open(recipe)
    tokenizer.chat_template = resolve_template(tokenizer, recipe.chat_template, recipe.chat_template_kwargs)
    with _new_folder(output_dir) as folder:
        if recipe.method == "full":
            model = build_model(recipe, config, LoadPlan(compute_dtype="float32", device="cpu"))
            read(model)
            tensors = whole_state(model)
        else:  # nothing of the base is written, so only its shapes are needed
            model = attach_adapter(model, recipe)
            tensors = read(model)
        write_model(folder, model, tensors, tokenizer, card, getattr(torch, dtype) if dtype else config.dtype)


def merge_adapter(recipe: Recipe, read: Read | None, output_dir: Path, dtype: str) -> Any:
    """Merge an adapter into its unquantised base, never into 4-bit weights, and save a plain model.

    Args:
        recipe: opens the base with its adapter.
        read: reads a checkpoint into the adapter; None if ``recipe`` opens the trained adapter itself.
        output_dir: new folder for the model.
        dtype: dtype of the merged weights; the merge is computed in it too.

    Returns:
        The merged model.

    Raises:
        UserError: adapter or base cannot be opened, do not fit each other, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    recipe = recipe.model_copy(update={"method": "lora"})
    tokenizer, config, _ = _open(recipe)
    if read:
        tokenizer.chat_template = resolve_template(tokenizer, recipe.chat_template, recipe.chat_template_kwargs)
    with _new_folder(output_dir) as folder:
        plan = LoadPlan(compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]  # float16 too: nothing trains
        adapted: Any = build_model(recipe, config, plan)
        if read:
            read(adapted)
        _refuse_untrained(dict(adapted.named_parameters()))
        merged = adapted.merge_and_unload(safe_merge=True)
        merged.config.use_cache = True
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _share_as_usual(folder)
    return merged


def _open(recipe: Recipe) -> tuple[Any, Any, Any]:
    """Open tokenizer, config and the model on meta, and check them before any weight is read."""
    config = open_config(recipe)
    model = build_meta_model(recipe, config)
    problems = check_model(recipe, config, model)
    raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
    return open_tokenizer(recipe), config, model


@contextmanager
def _new_folder(output_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``output_dir`` if the ``with`` block succeeds.

    If it fails, the temporary folder and parent folders created for it are deleted.

    Raises:
        UserError: the folder cannot be written.
    """
    staging = output_dir.with_name(f".{output_dir.name}.partial")
    made = [folder for folder in output_dir.parents if not os.path.exists(folder)]
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        os.replace(staging, output_dir)
    except (OSError, SafetensorError) as error:
        raise UserError(Problem("--output_dir", f"{output_dir} cannot be written ({error})")) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:  # succeeds only for empty ones
            with suppress(OSError):
                folder.rmdir()


def _refuse_untrained(state: dict[str, torch.Tensor]) -> None:
    """Raise ``TrainingError`` if every lora_B is zero: LoRA starts with B = 0, so nothing was trained or gathered."""
    if not any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name):
        raise TrainingError("every lora_B is zero: the adapter has learned nothing")


def model_card(recipe: Recipe, strategy: ActualStrategy, metrics: dict[str, float], steps: int) -> str:
    """Return a short model card: base, data, training settings, strategy and evaluation.

    Args:
        metrics: of the evaluation after the last step; empty if there was none.
        steps: optimiser steps done.
    """
    base, is_full = recipe.model_name_or_path, recipe.method == "full"
    base = Path(base).name if os.path.exists(os.path.expanduser(base)) else base
    lines = [
        "---",
        "library_name: " + ("transformers" if is_full else "peft"),
        f"base_model: {base}",
        "---",
        "",
    ]
    lines += [f"# {Path(base).name}, fine-tuned ({recipe.method})", ""]
    named = ", ".join(f"`{entry.name}`" for entry in recipe.datasets)
    items = "packs" if recipe.packing else "samples"
    lines += [f"- data: {named}, {steps} steps of {recipe.global_batch_size} {items}"]
    lines += [f"- peak learning rate {recipe.peak_learning_rate:g}, {recipe.lr_scheduler_type}, seed {recipe.seed}"]
    lines += [f"- {strategy.type} on {strategy.num_processes} process(es), mixed_precision {strategy.mixed_precision}"]
    lines += [f"- {name}: {value:.6g}" for name, value in metrics.items()]
    if recipe.new_tokens:
        tokens = ", ".join(f"`{token}`" for token in recipe.new_tokens)
        lines += [f"- new tokens: {tokens}"]
        if not is_full:
            resize = "base.resize_token_embeddings(len(tokenizer))"
            lines += [
                f"- the class below gives the base their rows; before `PeftModel.from_pretrained`, call `{resize}`"
            ]
    load = "AutoModelForCausalLM" if is_full else "AutoPeftModelForCausalLM"
    package = "transformers" if is_full else "peft"
    lines += [
        "",
        "```python",
        f"from {package} import {load}",
        f'model = {load}.from_pretrained("path/to/this/folder")',
        "```",
        "",
    ]
    return "\n".join(lines)
