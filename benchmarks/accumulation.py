"""Measure the memory of a step under FSDP2 by its number of micro-batches, on real processes of a CPU.

    torchrun --nproc_per_node 2 benchmarks/accumulation.py [--layers 12] [--hidden 768]

A random Llama is trained whole, in the ways of the kit. Prints a Markdown table for ``sync_each_batch`` true (the
default under FSDP) and false: the highest resident memory of rank 0 in a step, above that before the step, for 1, 4
and 16 micro-batches of 8 tokens.
"""

import argparse
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.config.recipe import Recipe
from kit.console import say
from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.model.loss_head import install_loss_head
from kit.strategy.accelerator import prepare, start
from kit.strategy.topology import Topology
from kit.train.objective import SupervisedLoss
from kit.train.optim import build_optimizer
from kit.train.step import train_step

TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    args = parser.parse_args()
    recipe = Recipe(model_name_or_path="m", dataset="d", method="full", output_dir="unused")
    topology = Topology(
        strategy="fsdp2", config_name="fsdp", num_processes=2, mixed_precision="no", device_type="cpu", rehearsal=True
    )
    accelerator, _ = start(recipe, topology)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=4096, num_attention_heads=args.hidden // 64))
    model.config.use_cache = False
    install_loss_head(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    prepared = prepare(accelerator, topology, model, build_optimizer(model, recipe))
    say(f"{size:,} parameters: gradients of the whole model {4 * size / 2**20:,.0f} MiB, of a shard half of it\n")
    say("| sync_each_batch | micro-batches | memory of the step, MiB |", "|---|---|---|")
    train_step(prepared, SupervisedLoss(["d"]), batch(1), 1e-4, 1.0)  # makes the optimiser's state
    for sync_each_batch in (True, False):
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = sync_each_batch
        for num_micro_batches in (1, 4, 16):
            with Peak() as peak:
                train_step(prepared, SupervisedLoss(["d"]), batch(num_micro_batches), 1e-4, 1.0)
            say(f"| {str(sync_each_batch).lower()} | {num_micro_batches} | {peak.num_bytes / 2**20:,.0f} |")
    torch.distributed.destroy_process_group()


def batch(num_micro_batches: int) -> GlobalBatch:
    ids = torch.randint(4096, (1, TOKENS))
    micro_batch = MicroBatch(
        input_ids=ids,
        target_positions=torch.arange(TOKENS - 1),
        targets=ids[0, 1:],
        weights=torch.ones(TOKENS - 1),
        sources=torch.zeros(TOKENS - 1, dtype=torch.long),
        attention_mask=torch.ones_like(ids),
    )
    num_targets = np.array([2 * num_micro_batches * (TOKENS - 1)])
    return GlobalBatch([micro_batch] * num_micro_batches, num_targets.astype(float), num_targets, num_targets, 0.0, [])


class Peak:
    """The highest resident memory in the ``with`` block above that at its beginning, asked for every 2 ms."""

    num_bytes = 0

    def __enter__(self) -> "Peak":
        self._before, self._ended = psutil.Process().memory_info().rss, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.num_bytes = max(self.num_bytes, psutil.Process().memory_info().rss - self._before)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


if __name__ == "__main__":
    main()
