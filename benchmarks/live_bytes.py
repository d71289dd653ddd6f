"""Bytes of tensors that a rank holds at the peak of a step, on real processes, by the number of its micro-batches.

    python benchmarks/live_bytes.py [--config fsdp] [--num_processes 2] [any finetune flag]

Trains the tiny model with recipes/finetune.py on the CPU, with 1, 4 and 16 micro-batches a step, each in processes of
its own. Resident memory would hide what is freed and used again, so storages are counted
(benchmarks/simulation/meter.py), each from the first operation that shows it until it is freed. Prints the peak of
rank 0 in the third step, and its parts.
"""

import argparse
import json
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
TALLY = "KIT_TALLY"  # environment variable: the file for the tally of the measured step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="fsdp")
    parser.add_argument("--num_processes", type=int, default=2)
    args, flags = parser.parse_known_args()
    print("| micro-batches | peak MB | of it |\n|---|---|---|")
    for count in NUM_MICRO_BATCHES:
        own = ["--model_name_or_path", str(ROOT / "recipes/tiny/model"), "--method", "full"]
        own += ["--dataset", str(ROOT / "recipes/tiny/train.jsonl"), "--max_length", "32"]
        own += ["--per_device_train_batch_size", "1", "--global_batch_size", str(count * args.num_processes)]
        tally = real_step(args.config, args.num_processes, [*own, *flags])
        parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in tally["components"]["cpu"].items())
        print(f"| {count} | {tally['peaks']['cpu'] / 1e6:.2f} | {parts} |", flush=True)


def real_step(config: str, num_processes: int, flags: list[str]) -> dict[str, Any]:
    """Train with recipes/finetune.py on the CPU, and return the tally of rank 0 in step ``MEASURED_STEP``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), __file__]
        command += ["--config", config, "--output_dir", f"{folder}/run", "--max_steps", str(MEASURED_STEP), *flags]
        tally = Path(folder) / "tally.json"
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {TALLY: str(tally)})
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(tally.read_text())


def measure() -> None:
    """Run recipes/finetune.py in this process, counting in each step."""
    sys.path.insert(0, str(ROOT))
    import kit.train.step
    from benchmarks.simulation.labels import label_storages
    from benchmarks.simulation.meter import Meter, Tally

    meter, plain, steps = Meter(), kit.train.step.train_step, list[Tally]()
    meter.watch_resizes()

    def train_step(prepared: Any, *args: Any, **kwargs: Any) -> Any:
        if not steps:
            label_storages(meter, prepared)
        with meter, meter.tally() as tally:
            result = plain(prepared, *args, **kwargs)
        steps.append(tally)
        if len(steps) == MEASURED_STEP and prepared.ranks.index == 0:
            Path(os.environ[TALLY]).write_text(json.dumps(vars(tally)))
        return result

    kit.train.step.train_step = train_step
    runpy.run_path(str(ROOT / "recipes/finetune.py"), run_name="__main__")


if __name__ == "__main__":
    measure() if TALLY in os.environ else main()
