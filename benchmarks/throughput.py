"""Tokens per second, peak memory, falling loss, resume and export on random weights of a public shape.

    python benchmarks/throughput.py --shape llama-1b --methods full lora qlora --out results.md

Makes a model folder of the shape (recipes/shapes/) with random weights and a dataset of full-length samples, then
runs recipes/finetune.py as a user would: some steps, the same command again for a few more, and the merge of the
adapter. The rate is the median over the steps after the first five.
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted(path.name for path in (ROOT / "recipes/shapes").iterdir())
    parser.add_argument("--shape", choices=[*shapes, "tiny"], default="llama-1b")
    parser.add_argument("--methods", nargs="+", choices=("full", "lora", "qlora"), default=["full", "lora", "qlora"])
    parser.add_argument("--config", default="single", help="Accelerate config")
    parser.add_argument("--max_length", type=int, default=4096, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--global_batch_size", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", choices=("true", "selective", "false"), default="true")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.shape)
        make_data(folder / "data.jsonl", folder / "model", args.max_length)
        rows = [measure(folder, method, args) for method in args.methods]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    lines = [
        f"## {datetime.date.today()}: {args.shape}, {args.max_length} tokens, {args.config}, {device}",
        "",
        f"torch {torch.__version__}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| method | tokens/s | peak GiB | loss first -> last | resumed | exported |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    print("\n".join(lines))
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


def make_model(folder: Path, shape: str) -> None:
    source = ROOT / "recipes" / ("tiny/model" if shape == "tiny" else f"shapes/{shape}")
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # The tokenizer of a small vocabulary gives valid ids for any larger one.
    AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model").save_pretrained(folder)


def make_data(path: Path, model: Path, max_length: int) -> None:
    """Write texts that are longer than ``max_length``, of few different words, so that the loss can fall."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(64):
            file.write(json.dumps({"text": " ".join(rng.choices(("Maria", "Oslo", "honey"), k=max_length))}) + "\n")


def measure(folder: Path, method: str, args: argparse.Namespace) -> list[str]:
    output = folder / f"run-{method}"
    flags = ["--config", args.config, "--method", method, "--model_name_or_path", str(folder / "model")]
    flags += ["--dataset", str(folder / "data.jsonl"), "--max_length", str(args.max_length)]
    flags += ["--output_dir", str(output), "--global_batch_size", str(args.global_batch_size)]
    flags += ["--gradient_checkpointing", args.gradient_checkpointing, "--lr_scheduler_type", "constant"]
    run("recipes/finetune.py", *flags, "--max_steps", str(args.steps))
    rows = metrics(output)
    timed = rows[WARM_UP_STEPS:]
    run("recipes/finetune.py", *flags, "--max_steps", str(args.steps + 3))
    resumed = metrics(output)
    exported = "plain model"
    if method != "full":
        run("recipes/export.py", str(output / "final"), "--output_dir", str(folder / f"merged-{method}"))
        exported = "merged"
    return [
        method,
        f"{statistics.median(row['tokens_per_second'] for row in timed):,.0f}",
        f"{max(row['peak_memory_bytes'] for row in rows) / 2**30:.1f}",
        f"{rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}",
        f"{len(resumed) - len(rows)} more steps, loss {resumed[-1]['loss']:.3f}",
        exported,
    ]


def metrics(output: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def run(script: str, *words: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / script), *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
