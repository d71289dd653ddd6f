"""Measure memory and time of the loss head against the loss of plain transformers, on a CPU.

    python benchmarks/loss_head.py [--vocabulary 128256] [--tokens 8192] [--hidden 256] [--dtype bfloat16]

A random Llama of one small layer computes the loss of every token of a row, forward and backward. Each variant runs in
a process of its own. Prints a Markdown table: the highest resident memory of the pass above that before it, and its
seconds (the faster of two).
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.model.loss_head import install_loss_head

VARIANTS = {
    "plain-trained": "plain transformers, trained head",
    "kit-trained": "loss head, trained",
    "plain-frozen": "plain transformers, frozen head",
    "kit-frozen": "loss head, frozen",
    "values-trained": "loss head, trained, label smoothing as a function of the logits",
    "values-frozen": "loss head, frozen, label smoothing as a function of the logits",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the model")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(*measure(args), sep="\t")
        return
    print("| variant | memory of the pass, MiB | seconds |\n|---|---|---|")
    for variant, title in VARIANTS.items():
        command = [sys.executable, *sys.argv, "--variant", variant]
        peak, seconds = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\t")
        print(f"| {title} | {int(peak) / 2**20:,.0f} | {float(seconds):.2f} |", flush=True)


def measure(args: argparse.Namespace) -> tuple[int, float]:
    shape = {"vocab_size": args.vocabulary, "hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
    config = LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=args.tokens)
    model: Any = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    model.config.use_cache = False
    model.lm_head.requires_grad_(args.variant.endswith("trained"))
    ids = torch.randint(args.vocabulary, (1, args.tokens))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if not args.variant.startswith("plain"):
        install_loss_head(model)
        inputs = {"input_ids": ids, "target_positions": torch.arange(args.tokens - 1), "targets": ids[0, 1:]}
    if args.variant.startswith("values"):
        inputs["target_values"] = lambda logits, rows: F.cross_entropy(
            logits, ids[0, 1:][rows], reduction="none", label_smoothing=0.1
        )
    for parameter in model.parameters():  # where they train, they are held whether logits are chunked or not
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    before, seconds = psutil.Process().memory_info().rss, []
    for _ in range(2):
        start = time.perf_counter()
        output = model(**inputs)
        (output.sum() if isinstance(output, torch.Tensor) else output.loss).backward()
        del output
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak - before, min(seconds)


if __name__ == "__main__":
    main()
