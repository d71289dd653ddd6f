"""Bytes of tensors that a rank holds at the peak of a step, on real processes, by the number of its micro-batches.

    python benchmarks/live_bytes.py [--config fsdp] [--num_processes 2] [any finetune flag]

Trains the tiny model with recipes/finetune.py on the CPU, with 1, 4 and 16 micro-batches a step, each in processes of
its own. Resident memory would hide what is freed and used again, so storages are counted (kit/plan/meter.py), each from
the first operation that shows it until it is freed. Prints the peak of rank 0 in the third step, and its parts.
"""

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_MICRO_BATCHES = (1, 4, 16)
MEASURED_STEP = 3  # the first ones make the optimiser's state and DDP's buckets


def main() -> None:
    if "RANK" in os.environ:
        return measure()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="fsdp")
    parser.add_argument("--num_processes", type=int, default=2)
    args, flags = parser.parse_known_args()
    print("| micro-batches | peak MB | of it |\n|---|---|---|")
    for count in NUM_MICRO_BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.num_processes)]
            command += [__file__, "--config", args.config, "--output_dir", folder + "/run"]
            command += ["--model_name_or_path", str(ROOT / "recipes/tiny/model"), "--method", "full"]
            command += ["--dataset", str(ROOT / "recipes/tiny/train.jsonl"), "--max_length", "32"]
            command += ["--max_steps", str(MEASURED_STEP), "--per_device_train_batch_size", "1"]
            command += ["--global_batch_size", str(count * args.num_processes)]
            command += flags
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        print(*(line for line in done.stdout.splitlines() if line.startswith("| ")), sep="\n", flush=True)


def measure() -> None:
    """Run recipes/finetune.py in this process, counting bytes in each step."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    import kit.train.step
    from kit.plan.meter import GRADIENTS, Meter

    meter, plain, resize, steps = Meter(), kit.train.step.train_step, torch.UntypedStorage.resize_, []

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage)
        return result

    def train_step(prepared: Any, objective: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        meter.hold(prepared.model.parameters(), "weights")
        for state in prepared.optimizer.state.values():
            meter.hold(state.values(), "optimiser")
        backward = prepared.accelerator.backward

        def labelling_backward(loss: torch.Tensor) -> None:
            backward(loss)
            meter.hold((p.grad for p in prepared.model.parameters()), GRADIENTS)

        prepared.accelerator.backward = labelling_backward
        with meter, meter.tally() as tally:
            result = plain(prepared, objective, batch, *args, **kwargs)
        prepared.accelerator.backward = backward
        steps.append(tally)
        if len(steps) == MEASURED_STEP and os.environ["RANK"] == "0":
            parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in tally.components["cpu"].items())
            print(f"| {len(batch.micro_batches)} | {tally.peaks['cpu'] / 1e6:.2f} | {parts} |", flush=True)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    kit.train.step.train_step = train_step
    runpy.run_path(str(ROOT / "recipes/finetune.py"), run_name="__main__")


if __name__ == "__main__":
    main()
