"""How much faster more processes are: strong scaling (the same global batch) and weak scaling (as much for each).

    python benchmarks/scaling.py --processes 1 2 4 8 --config ddp --recipe llama-8b-lora
    python benchmarks/scaling.py --processes 1 2 --model_name_or_path recipes/tiny/model     # gloo on a CPU

Runs recipes/finetune.py as a user would, on samples of full length. The rate is the median over the steps after the
first five. Without a GPU each process is given one core, so that one process does not have the threads of two. Two
processes on two cores share memory and caches, and gloo's exchange takes cores from them: such a figure says that the
benchmark works, and nothing about GPUs.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 5
PUBLISHED = {2: "1.7 to 1.8", 4: "3.2 to 3.5"}  # speed-up of data parallel fine-tuning, as others report it for GPUs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], help="numbers of processes; begin with 1")
    parser.add_argument("--config", default="ddp", help="Accelerate config of more than one process")
    parser.add_argument("--recipe", help="of recipes/; without it the kit's defaults")
    parser.add_argument("--model_name_or_path", default="recipes/tiny/model")
    parser.add_argument("--max_length", type=int, default=256, help="tokens per sample")
    parser.add_argument("--global_batch_size", type=int, default=16, help="of one process, and of strong scaling")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    has_gpu = _num_gpus() > 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data.jsonl", args.max_length)
        lines = []
        measured: dict[tuple[int, int], tuple[float, str]] = {}  # one process has the same run in both kinds
        for kind in ("strong", "weak"):
            first = 0.0
            for processes in args.processes:
                batch = args.global_batch_size * (processes if kind == "weak" else 1)
                if (processes, batch) not in measured:
                    output = folder / f"{processes}-{batch}"
                    measured[processes, batch] = measure(output, folder / "data.jsonl", processes, batch, args, has_gpu)
                rate, wait = measured[processes, batch]
                first = first or rate
                cells = [kind, processes, batch, f"{rate:,.0f}", f"{rate / first:.2f}"]
                cells += [f"{rate / first / processes:.0%}", wait, PUBLISHED.get(processes, "")]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    device = "GPUs" if has_gpu else f"gloo on a CPU ({platform.machine()}), one core a process: says nothing about GPUs"
    table = [
        f"## {datetime.date.today()}: scaling, {args.config}, {args.max_length} tokens, {device}",
        "",
        f"`{' '.join(['python', *sys.argv])}`; load of the machine {os.getloadavg()[1]:.1f}",
        "",
        "| scaling | processes | global batch | tokens/s | speed-up | efficiency | waiting | published |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
        "",
    ]
    print("\n".join(table))
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(table) + "\n")


def make_data(path: Path, max_length: int) -> None:
    """Write texts that are longer than ``max_length`` tokens, so that no process has more to compute than another."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(256):
            file.write(json.dumps({"text": " ".join(rng.choices(("Maria", "Oslo", "honey"), k=max_length))}) + "\n")


def measure(
    output: Path, data: Path, processes: int, batch: int, args: argparse.Namespace, has_gpu: bool
) -> tuple[float, str]:
    """Return tokens per second, and the share of the time that ranks waited for the slowest one."""
    flags = ["--config", args.config if processes > 1 else "single", "--num_processes", str(processes)]
    flags += ["--recipe", args.recipe] if args.recipe else ["--model_name_or_path", args.model_name_or_path]
    flags += ["--dataset", str(data), "--max_length", str(args.max_length), "--global_batch_size", str(batch)]
    flags += ["--max_steps", str(args.steps), "--logging_steps", "1", "--output_dir", str(output)]
    command = [sys.executable, "recipes/finetune.py", *flags]
    cores = None if has_gpu else sorted(os.sched_getaffinity(0))[:processes]
    pinned = partial(os.sched_setaffinity, 0, cores) if cores else None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=pinned)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rows = [row for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    timed = rows[WARM_UP_STEPS:]
    waits = [row["rank_wait_share"] for row in timed if "rank_wait_share" in row]
    rate = statistics.median(row["tokens_per_second"] for row in timed)
    return rate, f"{statistics.median(waits):.0%}" if waits else ""


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
