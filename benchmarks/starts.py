"""CPU seconds until a mistake is reported, and until a run takes its first step: each a whole command.

    python benchmarks/starts.py --before ../clone-of-another-version --out results.md

CPU seconds, user and system, of the command and all that it starts: a busy machine does not change them much. The table
has the median, and the seconds of the clock beside it. With --before, both versions run in turn.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINETUNE = ["recipes/finetune.py"]
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", "-q", *FINETUNE]
KIT = ["-m", "kit.cli.main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a clone of the version to compare with")
    parser.add_argument("--runs", type=int, default=3, help="of each command, after one that is not counted")
    parser.add_argument("--only", default="", help="commands whose name holds this")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    trees = [*([args.before.resolve()] if args.before else []), ROOT]
    head = " | ".join(f"{name} CPU s | clock s" for name in ("before", "after")[-len(trees) :])
    lines = [f"| command | {head} | status |", "|---" * (2 + 2 * len(trees)) + "|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as name:
        for command, words in commands(Path(name)).items():
            if args.only in command:
                lines.append(row(command, words, trees, args.runs, Path(name)))
                print(lines[-1], flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


def commands(folder: Path) -> dict[str, list[str]]:
    """The words of each command after ``python``, by what they show. OUT stands for a new folder."""
    tiny, data = ROOT / "recipes/tiny/model", ["--dataset", str(ROOT / "recipes/tiny/train.jsonl")]
    template = (tiny / "chat_template.jinja").read_text()
    for model in ("t5", "bare", "stop"):
        shutil.copytree(tiny, folder / model)
    t5 = {**json.loads((tiny / "config.json").read_text()), "model_type": "t5", "is_encoder_decoder": True}
    (folder / "t5/config.json").write_text(json.dumps(t5))
    (folder / "bare/chat_template.jinja").unlink()
    # The role `system` occurs nowhere in the training of the embedded model.
    (folder / "stop/chat_template.jinja").write_text(template.replace("eos_token", "'<|system|>'"))
    (folder / "taken").mkdir()
    (folder / "taken/thesis.txt").touch()

    def model(name: str) -> list[str]:
        return ["--model_name_or_path", str(folder / name), "--max_length", "128", *data]

    single, out = [*FINETUNE, "--config", "single"], ["--output_dir", "OUT"]
    missing = ["--dataset", str(folder / "none.jsonl"), *out]
    short = ["--max_steps", "1", "--predict_with_generate", "false", *out]
    return {
        "error: unknown flag": [*single, "--learning_rte", "1"],
        "error: no such model": [*single, *model("none"), *out],
        "error: model with encoder and decoder": [*single, *model("t5"), *out],
        "error: no such data": [*single, *missing],
        "error: no such data, ddp": [*FINETUNE, "--config", "ddp", *missing],
        "error: no such data, `accelerate launch`": [*ACCELERATE, "--config", "single", *missing],
        "error: no such column": [*single, *model("bare"), "--dataset_columns", "question=instruction", *out],
        "error: output_dir holds other files": [*single, "--output_dir", str(folder / "taken")],
        "error: no chat template": [*single, *model("bare"), *out],
        "error: token that ends answers was never trained": [*single, *model("stop"), "--method", "lora", *out],
        "start: one step": [*single, *short],
        "start: one step, lora": [*single, "--method", "lora", *short],
        "start: one step, `kit train`": [*KIT, "train", "--config", "single", *short],
        "start: one step, `accelerate launch`": [*ACCELERATE, "--config", "single", *short],
        "start: one step, ddp": [*FINETUNE, "--config", "ddp", *short],
        "start: one step, fsdp": [*FINETUNE, "--config", "fsdp", *short],
        "start: --dry_run": [*single, "--dry_run", *out],
        "kit inspect": [*KIT, "inspect", "--recipe", "tiny"],
        "kit inspect, lora": [*KIT, "inspect", "--recipe", "tiny", "--method", "lora"],
        "kit score": [*KIT, "score", str(folder / "reported"), str(ROOT / "recipes/tiny/eval.jsonl")],
        "kit chat": [*KIT, "chat", str(folder / "reported")],
        "kit plan": [*KIT, "plan", "--recipe", "llama-8b-qlora", "--gpu", "rtx4090"],
        "kit recipes": [*KIT, "recipes"],
        "kit report": [*KIT, "report", str(folder / "reported")],
    }


def row(command: str, words: list[str], trees: list[Path], num_runs: int, folder: Path) -> str:
    """The line of the table for a command."""
    if str(folder / "reported") in words and not (folder / "reported").exists():
        ran(
            [*FINETUNE, "--config", "single", "--max_steps", "1", "--output_dir", str(folder / "reported")],
            ROOT,
            folder,
        )
    measured: dict[Path, list[tuple[float, float, int]]] = {tree: [] for tree in trees}
    for number in range(num_runs + 1):
        for tree in trees:
            figures = ran(words, tree, folder)
            if number:  # the first one may compile, or fill the cache of tokenised data
                measured[tree].append(figures)
    cells = [command]
    for tree in trees:
        cpu, clock, _ = (statistics.median(values) for values in zip(*measured[tree], strict=True))
        cells += [f"{cpu:.2f}", f"{clock:.1f}"]
    statuses = {figures[2] for figures in measured[trees[-1]]}
    return f"| {' | '.join([*cells, ', '.join(map(str, sorted(statuses)))])} |"


def ran(words: list[str], tree: Path, folder: Path) -> tuple[float, float, int]:
    """Run a command, and return its seconds of CPU, those of the clock, and its status."""
    words = [str(folder / "out") if word == "OUT" else word for word in words]
    shutil.rmtree(folder / "out", ignore_errors=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(tree), "KIT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")  # nothing is written into the clones
    began = time.monotonic()
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *words], cwd=tree, env=env, **quiet)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime, time.monotonic() - began, process.returncode


if __name__ == "__main__":
    main()
