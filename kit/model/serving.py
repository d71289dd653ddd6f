"""Which adapters inference servers take as they are, and the command that makes a model for them of the others.

What each server takes, with file and line of its source: docs/after-training.md. Plain Python.
"""

import shlex
from pathlib import Path
from typing import Any

from kit.config.scripts import command_of

_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes; the first is its default
# Its table of models says of these that it takes their adapters, and these layers are what was tried.
VLLM_BASES = tuple(f"{name}ForCausalLM" for name in "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3".split())
_VLLM_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def merge_command(adapter: str | Path) -> str:
    """Return the command that merges the adapter in the folder ``adapter`` into its base, as an ordinary model."""
    return f"{command_of('export.py')} {shlex.quote(str(adapter))} --output_dir merged"


def serve_command(model: str | Path) -> str:
    """Return the command by which vLLM serves the model in the folder ``model``, which is none of an adapter."""
    return f"vllm serve {shlex.quote(str(model))}"


def why_not_served(config: Any) -> str:
    """Return why servers do not take an adapter with this config of peft; empty if they do.

    vLLM and llama.cpp refuse what is not a product of two matrices; norms llama.cpp leaves out. The servers named last
    always scale by alpha / r, so they would take an adapter of ``use_rslora`` and apply it more weakly than trained.
    """
    kind = config.peft_type.upper()  # plain text also of peft's PeftType, whose own text has the name of its class
    if kind != "LORA":
        return f"vLLM and llama.cpp take no {kind} adapter, only LoRA"
    kinds = {
        "trained rows of tokens": config.trainable_token_indices,
        "modules that trained whole": config.modules_to_save,
        "DoRA": config.use_dora,
    }
    found = [kind for kind, has_it in kinds.items() if has_it]
    if found:
        return f"vLLM and llama.cpp take no adapter with {' and '.join(found)}"
    if _rank_of(config) > _VLLM_RANKS[-1]:
        return f"vLLM takes no adapter of a rank above {_VLLM_RANKS[-1]}"
    return "llama.cpp, SGLang and LMDeploy do not know the scale of use_rslora" if config.use_rslora else ""


def vllm_command(config: Any, base: str | None, adapter: str, name: str = "mine") -> str:
    """Return the command by which vLLM serves an adapter as it is; empty if it does not take it, or nobody knows.

    Whether it takes adapters of the base is another question: ``VLLM_BASES``.

    Args:
        config: its ``LoraConfig``.
        base: name or folder of its base; None: not known.
        adapter: its folder, or its id on the hub.
        name: what requests call it.
    """
    targets = config.target_modules or ()
    names = {targets} if isinstance(targets, str) else {name.rpartition(".")[2] for name in targets}
    if "vLLM" in why_not_served(config) or config.target_parameters or not names <= _VLLM_LAYERS:
        return ""
    limit = next(rank for rank in _VLLM_RANKS if _rank_of(config) <= rank)
    words = ["vllm", "serve", base or "BASE", "--enable-lora", "--lora-modules", f"{name}={adapter}"]
    return shlex.join([*words, *(["--max-lora-rank", str(limit)] if limit > _VLLM_RANKS[0] else [])])


def _rank_of(config: Any) -> int:
    """The largest rank of its matrices."""
    return max([config.r, *(config.rank_pattern or {}).values()])
