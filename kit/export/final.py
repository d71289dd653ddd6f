"""``final/``: what plain ``from_pretrained`` opens, also made of a checkpoint; merging an adapter into its base.

A full model or a PEFT adapter, with tokenizer, chat template and card; written under another name, then renamed.
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
from kit.model.adapter import attach_adapter
from kit.model.load import build_meta_model, build_model, check_model, open_config, open_tokenizer
from kit.model.plan import LoadPlan
from kit.run.record import read_run
from kit.strategy.topology import ActualStrategy
from kit.strategy.weights import gather_trainable
from kit.train.loop_state import LoopState

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

# Reads a checkpoint's weights into the model it is given, and returns them by their names in it.
Read = Callable[[Any], dict[str, torch.Tensor]]


def save_final(prepared: "Prepared", tokenizer: Any, folder: Path, card: str, dtype: torch.dtype | None) -> None:
    """Write ``folder`` from any strategy: beside it first, then one rename. Called by all ranks.

    The rest is as in ``write_model``, of the whole weights.
    """
    accelerator, model = prepared.accelerator, prepared.model
    state = gather_trainable(accelerator, model)
    if accelerator.is_main_process:
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        write_model(staging, accelerator.unwrap_model(model), state, tokenizer, card, dtype)
        durable.sync_tree(staging)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
        durable.sync(folder.parent)
    accelerator.wait_for_everyone()


def write_model(
    folder: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any, card: str, dtype: torch.dtype | None
) -> None:
    """Fill ``folder`` with a full model, or with an adapter where ``model`` has one.

    Args:
        model: says what is written; of an adapted one no weight is read, it may be on meta.
        state: whole trainable tensors by their names in ``model``.
        card: text of the model card.
        dtype: of a full model's weights, None for float32; adapters stay in the float32 they were trained in.

    Raises:
        TrainingError: an adapter whose second matrices are all zero: nothing was trained.
    """
    if hasattr(model, "peft_config"):
        _refuse_untrained(state)
        _unwrapped_twin(model).save_pretrained(folder, state_dict=state)
    else:
        _save_full(model, state, folder, dtype or torch.float32)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    _share_as_usual(folder)


def _share_as_usual(folder: Path) -> None:
    """Give weight files the mode that any new file in ``folder`` has; safetensors makes them for their owner only."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # a disk without modes has nothing to share, and that must not cost the weights
            path.chmod(mode)


def _save_full(model: Any, state: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    config = model.config
    before = config.use_cache, config.dtype
    config.use_cache, config.dtype = True, dtype
    model.save_pretrained(folder, state_dict={name: tensor.to(dtype) for name, tensor in state.items()})
    config.use_cache, config.dtype = before


def _unwrapped_twin(model: Any) -> Any:
    """The same adapted model without memory and without wrappers: peft names what it saves after its modules."""
    from peft import get_peft_model

    with torch.device("meta"):
        base = type(model.get_base_model())(model.get_base_model().config)
    return get_peft_model(base, copy.deepcopy(model.peft_config["default"]))


def export_checkpoint(
    recipe: Recipe, run_file: Path, state: LoopState, read: Read, output_dir: Path, dtype: str | None
) -> None:
    """Write what ``final/`` would have been after a checkpoint's step, in one process.

    Args:
        recipe: opens the model of the run, as ``recipe_of_run`` makes it.
        run_file: ``run.json`` of the run, for the card.
        state: of the loop, as the checkpoint has it.
        read: the checkpoint's weights by their names in the model it is given (``read_weights``).
        dtype: of a full model, None for that of its base.

    Raises:
        UserError: the base cannot be opened or is another than the run's, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    run, strategy = read_run(run_file)
    run = run.model_copy(update={"model_name_or_path": recipe.model_name_or_path})  # it may have moved
    metrics = state.last_evaluation if state.evaluated_step == state.step else {}
    card = model_card(run, strategy, metrics, state.step)
    tokenizer, config, model = _open(recipe)
    tokenizer.chat_template = resolve_template(tokenizer, recipe.chat_template)
    with _new_folder(output_dir) as folder:
        if recipe.method == "full":
            model = build_model(recipe, config, LoadPlan(compute_dtype="float32", device="cpu"))
        else:  # of the base nothing is written, and only its shapes are needed
            model = attach_adapter(model, recipe)
        write_model(folder, model, read(model), tokenizer, card, getattr(torch, dtype) if dtype else config.dtype)


def merge_adapter(recipe: Recipe, read: Read | None, output_dir: Path, dtype: str) -> Any:
    """Add an adapter to its unquantised base and save a plain model. 4-bit weights are never merged into.

    Args:
        recipe: opens the base with its adapter.
        read: fills the adapter from a checkpoint; None where it is as ``recipe`` opens it.
        dtype: of the merged model, which is computed in it too.

    Returns:
        The merged model.

    Raises:
        UserError: adapter or base cannot be opened, do not fit each other, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    recipe = recipe.model_copy(update={"method": "lora"})
    tokenizer, config, _ = _open(recipe)
    if read:
        tokenizer.chat_template = resolve_template(tokenizer, recipe.chat_template)
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
    """Tokenizer, config, and the model without memory, checked before any weight is read."""
    config = open_config(recipe)
    model = build_meta_model(recipe, config)
    problems = check_model(recipe, config, model)
    raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
    return open_tokenizer(recipe), config, model


@contextmanager
def _new_folder(output_dir: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``output_dir`` when all went well; else nothing is left, nor parents made for it.

    Raises:
        UserError: it cannot be written.
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
        for folder in made:  # those left empty
            with suppress(OSError):
                folder.rmdir()


def _refuse_untrained(state: dict[str, torch.Tensor]) -> None:
    """A LoRA starts with B = 0: all zero still means nothing was trained, or nothing was gathered."""
    if not any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name):
        raise TrainingError("every lora_B is zero: the adapter has learned nothing")


def model_card(recipe: Recipe, strategy: ActualStrategy, metrics: dict[str, float], steps: int) -> str:
    """A short card: what was trained on what, how, and what the evaluation said."""
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
