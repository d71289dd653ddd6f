"""Bytes of tensors that the formulas of ``kit plan`` predict, beside those of the kit's own step without a GPU.

    python benchmarks/plan_formulas.py [--only TEXT]

Runs a step of each of ``CASES`` on tensors without values (benchmarks/simulation), some 10 s each.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.simulate import simulate  # noqa: E402
from kit.memory.formulas import predict  # noqa: E402
from kit.memory.workload import Workload  # noqa: E402
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD, SINGLE  # noqa: E402
from kit.tools.plan.models import find_shape  # noqa: E402

GIB = 2**30
EIGHT = {"strategy": FSDP2, "num_gpus": 8}
COPIES = {"strategy": HYBRID, "num_gpus": 16, "num_replicas": 2}
TAUGHT = {"objective": "distil", "teacher": "llama-8b", "logit_bytes": 30}
# Each method, strategy, kind of checkpointing and objective.
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "full, fsdp": {"method": "full", **EIGHT},
    "full, hybrid": {"method": "full", **COPIES, "micro_batches": 3},
    "full, offload": {"method": "full", "strategy": OFFLOAD, "num_gpus": 8, "micro_batches": 1},
    "lora, selective": {"method": "lora", "gradient_checkpointing": "selective"},
    "lora, float32": {"method": "lora", "gradient_checkpointing": False, "mixed_precision": "no"},
    "lora, fsdp, none": {"method": "lora", **EIGHT, "gradient_checkpointing": False},
    "lora, offload": {"method": "lora", "strategy": OFFLOAD, "num_gpus": 8, "micro_batches": 1},
    "lora, eager": {"method": "lora", "shape": "gemma-2-2b", "eager": True, "gradient_checkpointing": False},
    "qlora, ddp": {"method": "qlora", "strategy": DDP, "num_gpus": 8},
    "qlora, fp16": {"method": "qlora", "gradient_checkpointing": False, "mixed_precision": "fp16"},
    "dpo, lora, fsdp": {"objective": "dpo", "method": "lora", **EIGHT, "length": 1024},
    "dpo, lora, none": {"objective": "dpo", "method": "lora", "gradient_checkpointing": False, "length": 1024},
    "dpo, full, packs": {"objective": "dpo", "method": "full", **EIGHT, "packing": True, "length": 1024},
    "distil, full": {**TAUGHT, "method": "full"},
    "distil, lora, fsdp": {**TAUGHT, "method": "lora", **EIGHT},
    "distil, lora, 4 bits": {**TAUGHT, "method": "lora", "teacher_in_4bit": True},
    "images, qlora": {"method": "qlora", "shape": "qwen2.5-vl-7b", "image_tokens": 1280},
    "images, all, fsdp": {
        "method": "full",
        "shape": "qwen2.5-vl-3b",
        "image_tokens": 1280,
        "trained_parts": ("vision", "projector", "language"),
        **EIGHT,
    },
    "experts, lora, fsdp": {"method": "lora", "shape": "qwen3-30b-a3b", **EIGHT},
    "experts, full, fsdp": {"method": "full", "shape": "gpt-oss-20b", "eager": True, **EIGHT, "length": 1024},
    "experts, qlora, adapted": {
        "method": "qlora",
        "shape": "qwen3-30b-a3b",
        "lora_targets": ("q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"),
    },
    "experts in MXFP4": {"method": "qlora", "shape": "gpt-oss-20b", "eager": True},
    "kto, qlora": {"objective": "kto", "method": "qlora", "gradient_checkpointing": False, "length": 1024},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    only = parser.parse_args().only
    print("| case | GiB simulated | planned | difference |\n|---|---|---|---|")
    worst = 0.0
    for name in (name for name in CASES if only in name):
        values = {
            "shape": "llama-1b",
            "strategy": SINGLE,
            "length": 2048,
            "micro_batches": 2,
            "gradient_checkpointing": True,
        }
        values |= CASES[name]
        shapes = {key: find_shape(values[key]) for key in ("shape", "teacher") if key in values}
        workload = Workload(**values | shapes)
        simulated, planned = simulate(workload).tensors, predict(workload).tensors
        worst = max(worst, abs(planned / simulated - 1))
        print(f"| {name} | {simulated / GIB:.2f} | {planned / GIB:.2f} | {planned / simulated - 1:+.1%} |", flush=True)
    print(f"\nThe largest error is {worst:.1%}.")


if __name__ == "__main__":
    main()
