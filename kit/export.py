"""``final/``: what plain ``from_pretrained`` opens, and merging an adapter into its base.

A full model or a PEFT adapter, with tokenizer, chat template and card; written beside its place, then renamed.
"""

import copy
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from kit.config import LoadPlan, Recipe
from kit.errors import Problem, TrainingError, UserError, raise_if
from kit.model import build_meta_model, build_model, check_model, open_config, open_tokenizer
from kit.places import base_of_adapter
from kit.strategy import gather_trainable

if TYPE_CHECKING:
    from accelerate import Accelerator


def save_final(
    accelerator: "Accelerator",
    model: torch.nn.Module,
    tokenizer: Any,
    folder: Path,
    card: str,
    dtype: torch.dtype | None,
) -> None:
    """Write ``folder`` from any strategy: beside it first, then one rename. Called by all ranks.

    Args:
        card: text of the model card.
        dtype: of a full model's weights, None for float32; adapters stay in the float32 they were trained in.

    Raises:
        TrainingError: an adapter whose second matrices are all zero: nothing was trained.
    """
    state = gather_trainable(accelerator, model)
    if accelerator.is_main_process:
        inner = accelerator.unwrap_model(model)
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        if hasattr(inner, "peft_config"):
            _refuse_untrained(state)
            _unwrapped_twin(inner).save_pretrained(staging, state_dict=state)
        else:
            _save_full(inner, state, staging, dtype or torch.float32)
        tokenizer.save_pretrained(staging)
        (staging / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    accelerator.wait_for_everyone()


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


def merge_adapter(adapter: Path, output_dir: Path, base: str | None, dtype: str) -> None:
    """Add an adapter to its unquantised base and save a plain model. 4-bit weights are never merged into.

    Raises:
        UserError: adapter or base cannot be opened, do not fit each other, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    base = base or base_of_adapter(adapter, "give the base: --model_name_or_path BASE")
    recipe = Recipe(
        model_name_or_path=base,
        adapter_name_or_path=str(adapter.absolute()),
        attn_implementation="eager",  # nothing is computed
        dataset="none",
        max_length=8,
    )
    config = open_config(recipe)
    problems = check_model(recipe, config, build_meta_model(recipe, config))
    raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
    tokenizer = open_tokenizer(recipe)
    staging = output_dir.with_name(f".{output_dir.name}.partial")
    plan = LoadPlan(compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]  # float16 too: nothing trains
    made = [folder for folder in output_dir.parents if not os.path.exists(folder)]
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        merged: Any = build_model(recipe, config, plan)
        _refuse_untrained(dict(merged.named_parameters()))
        plain = merged.merge_and_unload(safe_merge=True)
        plain.config.use_cache = True
        plain.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
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


def model_card(recipe: Recipe, actual: dict[str, Any], metrics: dict[str, float], steps: int) -> str:
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
    lines += [
        f"- {actual['type']} on {actual['num_processes']} process(es), mixed_precision {actual['mixed_precision']}"
    ]
    lines += [f"- {name}: {value:.6g}" for name, value in metrics.items()]
    load = "AutoModelForCausalLM" if is_full else "AutoPeftModelForCausalLM"
    package = "transformers" if is_full else "peft"
    lines += [
        "",
        "```python",
        f"from {package} import {load}",
        f'model = {load}.from_pretrained("final")',
        "```",
        "",
    ]
    return "\n".join(lines)
