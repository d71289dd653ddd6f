"""Time LoRA on the fused experts of a small Qwen3-MoE: peft's own forward, and the kit's.

    python benchmarks/expert_lora.py [--hidden_size 256] [--num_experts 32] [--tokens 512] [--dtype bfloat16]

Prints a Markdown table: the median of the seconds that a forward and backward pass takes of one CPU core, which do not
depend on other work on the machine; its ratio to the first row; and the loss, which is the same in all up to rounding.
All variants have the same weights, and take turns, one pass each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from kit.model.experts.forward import install_expert_lora

# By name: experts_implementation, and what is done to the model with its adapters.
VARIANTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "peft, eager": ("eager", lambda model: None),
    "peft, grouped_mm": ("grouped_mm", lambda model: None),
    "peft, batched_mm": ("batched_mm", lambda model: None),
    "kit, eager": ("eager", lambda model: install_expert_lora(model, 0.0)),
    "kit, grouped_mm": ("grouped_mm", lambda model: install_expert_lora(model, 0.0)),
}
VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--moe_intermediate_size", type=int, default=128)
    parser.add_argument("--num_experts", type=int, default=32)
    parser.add_argument("--num_experts_per_tok", type=int, default=4)
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the frozen weights")
    parser.add_argument("--passes", type=int, default=5, help="timed passes of each variant, after one that is not")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: adapted(args, *VARIANTS[name]) for name in args.variants}
    rows = torch.randint(VOCABULARY, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    losses = {name: one_pass(model, rows)[1] for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.passes):
        for name, model in models.items():
            seconds[name].append(one_pass(model, rows)[0])
    print("| variant | CPU seconds | ratio | loss |\n|---|---|---|---|")
    first = statistics.median(seconds[args.variants[0]])
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"| {name} | {median:.3f} | {median / first:.2f} | {losses[name]:.6f} |")


def adapted(args: argparse.Namespace, implementation: str, change: Callable[[Any], None]) -> Any:
    """Return a random model with LoRA on its experts, the same for each variant."""
    names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers")
    sizes = {name: getattr(args, name) for name in names}
    config = Qwen3MoeConfig(**sizes, vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM._from_config(
        config, dtype=getattr(torch, args.dtype), experts_implementation=implementation
    )
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=args.lora_r, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model = get_peft_model(base, lora)
    change(model)
    return model.train()


def one_pass(model: Any, rows: torch.Tensor) -> tuple[float, float]:
    """Return the CPU seconds of a forward and backward pass, and the loss."""
    model.zero_grad()
    start = time.process_time()
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    return time.process_time() - start, loss.item()


if __name__ == "__main__":
    main()
