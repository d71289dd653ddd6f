"""``final/``: what plain ``from_pretrained`` opens. A full model, or a PEFT adapter; tokenizer and template included."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import TrainingError
from kit.strategy import gather_trainable

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.config import Recipe


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
            if not any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name):
                raise TrainingError("every lora_B is zero: the adapter has learned nothing")
            inner.save_pretrained(staging, state_dict=state, safe_serialization=True)
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


def model_card(recipe: "Recipe", actual: dict[str, Any], metrics: dict[str, float], steps: int) -> str:
    """A short card: what was trained on what, how, and what the evaluation said."""
    base, is_full = recipe.model_name_or_path, recipe.method == "full"
    base = Path(base).name if Path(base).exists() else base
    lines = [
        "---",
        "library_name: " + ("transformers" if is_full else "peft"),
        f"base_model: {base}",
        "---",
        "",
    ]
    lines += [f"# {Path(base).name}, fine-tuned ({recipe.method})", ""]
    lines += [f"- data: `{Path(recipe.dataset).name}`, {steps} steps of {recipe.global_batch_size} samples"]
    lines += [f"- peak learning rate {recipe.peak_learning_rate:g}, {recipe.lr_scheduler_type}, seed {recipe.seed}"]
    lines += [f"- {actual['type']} on {actual['num_processes']} processes, precision {actual['mixed_precision']}"]
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
