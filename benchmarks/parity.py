"""Measure how much loss and gradient norm differ between topologies, in fp32, with your model and data.

    python benchmarks/parity.py --model_name_or_path M --dataset D --max_length 512 [any finetune flag]

Runs recipes/finetune.py on every topology below with global_batch_size 8. Prints a Markdown table of the largest
relative differences from a single process with micro-batches of one. Topologies with several processes use two, hybrid
sharding four; without a GPU they run on the CPU.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPOLOGIES = [
    ("single, 8 x 1", "single", 1, 1),
    ("single, 1 x 8", "single", 1, 8),
    ("DDP, 2 processes", "ddp", 2, 2),
    ("FSDP2, 2 processes", "fsdp", 2, 2),
    ("FSDP2 hybrid, 2 copies x 2 processes", "fsdp_hybrid", 4, 2),
    ("FSDP1, 2 processes", "fsdp1", 2, 2),
]


def main() -> None:
    flags = sys.argv[1:]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, config, processes, micro_batch in TOPOLOGIES:
            print(f"{title} ...", file=sys.stderr, flush=True)
            rows[title] = run(Path(folder), flags, config, processes, micro_batch)
    reference = next(iter(rows.values()))
    print(f"{len(reference)} steps, loss {reference[0]['loss']:.4f} -> {reference[-1]['loss']:.4f}\n")
    print("| topology | worst relative difference of loss | of gradient norm |\n|---|---|---|")
    for title, run_rows in rows.items():
        worst = [max(abs(a[k] - b[k]) / abs(b[k]) for a, b in zip(run_rows, reference, strict=True)) for k in KEYS]
        print(f"| {title} | {worst[0]:.1e} | {worst[1]:.1e} |")


KEYS = ("loss", "grad_norm")


def run(folder: Path, flags: list[str], config: str, processes: int, micro_batch: int) -> list[dict[str, float]]:
    """Run the script on one topology, and return the metrics of each step."""
    text = (ROOT / "accelerate_configs" / f"{config}.yaml").read_text()
    path = folder / f"{config}.yaml"
    path.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    output = folder / f"{config}-{micro_batch}"
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), "--config", str(path), "--output_dir", str(output)]
    command += ["--num_processes", str(processes), "--global_batch_size", "8"]
    command += ["--per_device_train_batch_size", str(micro_batch), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


if __name__ == "__main__":
    main()
