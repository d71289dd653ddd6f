"""The kit beside TRL's SFTTrainer: the same model, samples, order and optimiser; speed, memory and loss.

    pip install trl==1.16.0
    python benchmarks/against_trl.py --model FOLDER --dataset rows.jsonl --columns question,answer

The dataset is one file of JSON Lines with a prompt and a completion, between which a newline is put. Both sides take
its rows in the order of the file, learn from the completions alone (`+all`: from the prompts too), and update all
weights in float32 (on a GPU: with bf16 autocast) or adapters of the same shape; what is not named here is each side's
default. The sides alternate, each run in a new process. The first steps are left out of the speed. Losses are compared
step by step: where they differ by more than 1 %, the two sides did not do the same work, and the table says so instead
of a ratio.

Packing: without a variable-length kernel (flash-attn, on a GPU) TRL's packed samples see each other, so their losses
differ from the kit's by what that does.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 5
LEARNING_RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model with its tokenizer")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--columns", default="prompt,completion", help="their names in the dataset")
    cases = "full, lora; with +all: the prompts are learned from too; with +packing: packed"
    parser.add_argument("--cases", nargs="+", default=["full", "lora"], help=cases)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--global_batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=json.loads, default={}, help="more settings of TRL, as JSON")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.data = write_data(Path(folder, "data.jsonl"), args)
        lines = [*header(args), *(row(case, args) for case in args.cases), ""]
    print("\n".join(lines))
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


def write_data(path: Path, args: argparse.Namespace) -> Path:
    prompt, completion = args.columns.split(",")
    with path.open("w") as file:
        for row in map(json.loads, Path(args.dataset).read_text().splitlines()):
            file.write(json.dumps({"prompt": f"{row[prompt]}\n", "completion": row[completion]}) + "\n")
    return path


def title() -> list[str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return [f"## {datetime.date.today()}: beside TRL, {device}", ""]


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "trl"))


def header(args: argparse.Namespace) -> list[str]:
    return [
        *title(),
        f"{versions()}; {os.cpu_count()} processors; {args.rounds} rounds of {args.steps} steps, the first "
        f"{WARM_UP_STEPS} left out of the speed; `{' '.join(['python', *sys.argv])}`",
        "",
        "| case | seconds a step, TRL | the kit | TRL's time over the kit's (range of the rounds) | peak GiB, TRL "
        "| the kit | largest difference of a loss |",
        "|---|---|---|---|---|---|---|",
    ]


def row(case: str, args: argparse.Namespace, script: str = __file__, **flags: Any) -> str:
    """Run both sides alternately, and return a row of the table.

    Args:
        script: runs TRL's side, see ``run_trl``.
        flags: more flags of the kit.
    """
    theirs, ours = [], []
    for _ in range(args.rounds):
        theirs.append(run_trl(case, args, script))
        ours.append(run_kit(case, args, **flags))
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(theirs, ours, strict=True)]
    pairs = list(zip(theirs[0]["losses"], ours[0]["losses"], strict=True))
    differs = max(abs(a - b) / abs(b) for a, b in pairs)
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    cells = [
        case,
        f"{statistics.median(side['seconds'] for side in theirs):.3f}",
        f"{statistics.median(side['seconds'] for side in ours):.3f}",
        ratio if differs <= 0.01 else f"not the same work ({ratio})",
        f"{max(side['bytes'] for side in theirs) / 2**30:.2f}",
        f"{max(side['bytes'] for side in ours) / 2**30:.2f}",
        f"{differs:.1e}",
    ]
    print(" | ".join(cells), file=sys.stderr, flush=True)
    return f"| {' | '.join(cells)} |"


def run_kit(case: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    import torch

    method, *options = case.split("+")
    precision = {"config": "single"} if torch.cuda.is_available() else {}  # bf16 on a GPU, as TRL's side
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            **precision,
            "model_name_or_path": args.model,
            "dataset": args.data,
            "method": method,
            "max_length": args.max_length,
            "packing": "true" if "packing" in options else "false",
            "train_on": "all" if "all" in options else "assistant",
            "per_device_train_batch_size": args.micro_batch,
            "global_batch_size": args.global_batch_size,
            "max_steps": args.steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "weight_decay": 0,
            "shuffle": "false",
            "save_steps": 0,
            "output_dir": f"{folder}/run",
            **more,
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        resident = run([str(ROOT / "recipes/finetune.py"), *words])
        lines = map(json.loads, Path(folder, "run/metrics.jsonl").read_text().splitlines())
        rows = [each for each in lines if "loss" in each]
    ends = [each["seconds"] for each in rows]
    return side(ends, [each["loss"] for each in rows], resident, max(each["peak_memory_bytes"] for each in rows))


def run_trl(case: str, args: argparse.Namespace, script: str) -> dict[str, Any]:
    """Run TRL's side, the Python file ``script`` with ``--trl``, a folder for its result, and the arguments as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**vars(args), "data": str(args.data), "case": case, "out": None}
        resident = run([script, "--trl", folder, json.dumps(settings)])
        found = json.loads(Path(folder, "result.json").read_text())
    return side(found["ends"], found["losses"], resident, found["bytes"])


def side(ends: list[float], losses: list[float], resident: int, allocated: int) -> dict[str, Any]:
    """What is compared. Bytes: allocated ones of a GPU; else resident ones, also while loading and tokenising."""
    import torch

    return {
        "seconds": (ends[-1] - ends[WARM_UP_STEPS - 1]) / (len(ends) - WARM_UP_STEPS),
        "losses": losses,
        "bytes": allocated if torch.cuda.is_available() else resident,
    }


def run(words: list[str]) -> int:
    """Run a Python program, and return the largest number of its resident bytes."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(output.read())
    return usage.ru_maxrss * 1024


def train_with_trl(folder: str, args: argparse.Namespace) -> None:
    """TRL's side, in a process of its own."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    _, *options = args.case.split("+")
    settings = settings_of_trl(folder, args) | args.theirs
    config = SFTConfig(packing="packing" in options, completion_only_loss="all" not in options, **settings)
    data = load_dataset("json", data_files=args.data, split="train")
    train(folder, args, SFTTrainer, config, data)


def settings_of_trl(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that TRL's trainers share."""
    import torch

    return {
        "output_dir": f"{folder}/run",
        "model_init_kwargs": {"dtype": "float32"},
        "max_length": args.max_length,
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": args.global_batch_size // args.micro_batch,
        "max_steps": args.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train(folder: str, args: argparse.Namespace, trainer_class: Any, config: Any, data: Any) -> None:
    """Train with a trainer of TRL, and write losses, the time at the end of each step, and bytes."""
    import time

    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback

    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    is_lora = args.case.startswith("lora")
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if is_lora else None
    trainer = trainer_class(model=args.model, args=config, train_dataset=data, peft_config=adapter, callbacks=[Clock()])
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    Path(folder, "result.json").write_text(json.dumps({"ends": ends, "losses": losses, "bytes": allocated}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
    else:
        main()
