"""Bytes of real training runs on the CPU, beside those of the same runs on tensors without values.

    python benchmarks/plan_memory.py [--method full lora] [--topology fsdp2] [--layers 4] [--hidden 256] [--length 256]

Makes a random Llama, trains it with recipes/finetune.py, full, lora and qlora, on one process and with FSDP2 on two,
with each kind of gradient checkpointing, counts the bytes of tensors in the third step, and
simulates the same runs on fake tensors. "saved" are the activations that a forward pass has left for the backward
pass, "gathered" the bytes that FSDP2 gathers in a step, "peak" all tensors at the fullest moment.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from live_bytes import real_step

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.simulate import simulate  # noqa: E402
from kit.memory.workload import Workload  # noqa: E402
from kit.model.layers.checkpointing import Checkpointing  # noqa: E402
from kit.strategy.strategies import Strategy  # noqa: E402
from kit.tools.plan.models import read_shape  # noqa: E402

METHODS, TOPOLOGIES = ("full", "lora", "qlora"), ("single", "fsdp2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    for name, default in (("layers", 4), ("hidden", 256), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(
        "| method | topology | checkpointing | saved MB | predicted | gathered MB | predicted | peak MB | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options.layers, options.hidden)
        for method, strategy, checkpointing in itertools.product(
            options.method, options.topology, (False, "selective", True)
        ):
            pairs = list(compare(model, method, strategy, checkpointing, options.length))
            cells = [f"{real / 1e6:.2f} | {predicted / 1e6:.2f}, {error:+.1%}" for real, predicted, error in pairs]
            worst = max(worst, *(abs(error) for *_, error in pairs))
            print(f"| {method} | {strategy} | {str(checkpointing).lower()} | {' | '.join(cells)} |", flush=True)
    print(f"\nThe largest error is {worst:.1%}.")


def make_model(folder: Path, num_layers: int, hidden: int) -> Path:
    """Write a random Llama with the tokenizer of the tiny recipe, and beside it a dataset of long rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = folder / "model"
    shutil.copytree(ROOT / "recipes/tiny/model", model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = AutoConfig.from_pretrained(ROOT / "recipes/tiny/model")
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": num_layers}
    config.update(sizes | {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32})
    config.max_position_embeddings = 4096
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(64):
            file.write(json.dumps({"text": f"{i} " + "a row that is cut off at its longest " * 300}) + "\n")
    return model


def compare(
    model: Path,
    method: Literal["full", "lora", "qlora"],
    strategy: Literal["single", "fsdp2"],
    checkpointing: Checkpointing,
    length: int,
) -> Iterator[tuple[float, float, float]]:
    """Yield what was measured and predicted of saved, gathered and peak bytes, and the error of the prediction."""
    num_processes = 1 if strategy == "single" else 2
    workload = Workload(
        shape=read_shape(model / "config.json", "random"),
        method=method,
        strategy=Strategy(strategy),
        num_gpus=num_processes,
        rows=2,
        length=length,
        micro_batches=2,
        gradient_checkpointing=checkpointing,
    )
    flags = {
        "model_name_or_path": model,
        "dataset": model.parent / "rows.jsonl",
        "method": method,
        "max_length": length,
        "excess_length_strategy": "truncate",
        "per_device_train_batch_size": workload.rows,
        "global_batch_size": workload.rows * num_processes * workload.micro_batches,
        "gradient_checkpointing": checkpointing,
    }
    real = real_step(workload.config, num_processes, [f"--{name}={value}" for name, value in flags.items()])
    predicted = simulate(workload)
    pairs = [
        (_activations(real["moments"]["cpu"]["backward"]), _activations(predicted.saved)),
        (real["collective_bytes"].get("allgather_base", 0), predicted.collective_bytes.get("allgather_base", 0)),
        (real["peaks"]["cpu"], predicted.tensors),
    ]
    for measured, expected in pairs:
        yield measured, expected, (expected - measured) / measured if measured else 0.0


def _activations(parts: dict[str, int]) -> int:
    """Bytes that a forward pass made, in components of the tally; a real meter does not know logits."""
    return parts.get("activations", 0) + parts.get("logits", 0)


if __name__ == "__main__":
    main()
