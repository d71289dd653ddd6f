"""Which adapters inference servers load unmerged, and the command that merges the others.

What each server takes, with file and line of its source: docs/after-training.md. Plain Python.
"""

import shlex
from pathlib import Path
from typing import Any

from kit.config.commands import command_of

_VLLM_RANK = 512  # the largest of vLLM's --max-lora-rank


def merge_command(adapter: str | Path) -> str:
    """Return the command that merges the adapter in the folder ``adapter`` into its base, as an ordinary model."""
    return f"{command_of('export.py')} {shlex.quote(str(adapter))} --output_dir merged"


def serve_command(model: str | Path) -> str:
    """Return the command by which vLLM serves the model in the folder ``model``, which is a full model."""
    return f"vllm serve {shlex.quote(str(model))}"


def why_not_served(config: Any, by_vllm: bool = False) -> str:
    """Return why servers, or vLLM alone, do not take an adapter with this config of peft; empty if they do.

    vLLM and llama.cpp refuse what is not a product of two matrices; norms llama.cpp leaves out. The servers named last
    always scale by alpha / r, so they would take an adapter of ``use_rslora`` and apply it more weakly than trained.
    """
    kind = config.peft_type.upper()  # plain text also of peft's PeftType, whose own text has the name of its class
    if kind != "LORA":
        return f"vLLM and llama.cpp load no {kind} adapter, only LoRA"
    kinds = {
        "trained token rows": config.trainable_token_indices,
        "modules_to_save": config.modules_to_save,
        "DoRA": config.use_dora,
    }
    found = [kind for kind, has_it in kinds.items() if has_it]
    if found:
        return f"vLLM and llama.cpp load no adapter with {' and '.join(found)}"
    if config.target_parameters:
        return "no server was tried with an adapter on fused experts; vLLM loads those of a few families, by its source"
    if max([config.r, *(config.rank_pattern or {}).values()]) > _VLLM_RANK:
        return f"vLLM loads no adapter of rank above {_VLLM_RANK}"
    is_weaker = config.use_rslora and not by_vllm
    return "llama.cpp, SGLang and LMDeploy do not apply the scaling of use_rslora" if is_weaker else ""
