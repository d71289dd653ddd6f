"""Host memory of each rank while a full model is loaded, sharded by FSDP2, and written to ``final/``; no training.

    torchrun --nproc_per_node 2 benchmarks/host_memory.py [--layers 4] [--hidden 512] [--folder DIR]

A random Llama on the CPU. Prints for each rank by how much loading and then writing raised the peak of its resident
memory above that before it, beside the size of the model in float32. Linux only.
"""

import argparse
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from saving import peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from kit.config.recipe import Recipe
from kit.export.final import save_final
from kit.model.load import build_model, open_config
from kit.strategy.accelerator import prepare, start
from kit.strategy.strategies import FSDP2
from kit.strategy.topology import Topology
from kit.train.optim import build_optimizer

NO_TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda folder: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kit-host-memory")
    args = parser.parse_args()
    recipe = Recipe(model_name_or_path=str(args.folder / "model"), dataset="d", method="full")
    topology = Topology(
        strategy=FSDP2,
        config_name="fsdp",
        num_processes=int(os.environ["WORLD_SIZE"]),
        mixed_precision="no",
        device_type="cpu",
        load_on_rank0=True,
    )
    accelerator, plan = start(recipe, topology)
    if accelerator.is_main_process:
        shape = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
        random = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=8000, num_attention_heads=args.hidden // 64))
        random.save_pretrained(recipe.model_name_or_path)
        del random
    accelerator.wait_for_everyone()

    config = open_config(recipe)
    before = start_afresh()
    model = build_model(recipe, config, plan)
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    prepared = prepare(accelerator, topology, model, build_optimizer(model, recipe, recipe.peak_learning_rate))
    del model
    loading = peak_bytes() - before
    before = start_afresh()
    save_final(prepared, NO_TOKENIZER, args.folder / "final", "card", torch.bfloat16)
    writing = peak_bytes() - before
    for rank in range(topology.num_processes):
        if rank == accelerator.process_index:
            print(
                f"rank {rank}: model {num_bytes / 1e6:,.0f} MB, "
                f"loading + {loading / 1e6:,.0f} MB, writing + {writing / 1e6:,.0f} MB",
                flush=True,
            )
        accelerator.wait_for_everyone()
    accelerator.end_training()


def start_afresh() -> int:
    """Let the peak of resident memory start afresh, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


if __name__ == "__main__":
    main()
