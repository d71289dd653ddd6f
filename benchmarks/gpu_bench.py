"""What the parts of ``benchmarks/gpu.py`` share: figures with their bounds, the machine, and runs of the kit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes/tiny"


class Skipped(Exception):
    """This machine, or these settings, cannot do a part; the text says why."""


class Broken(Exception):
    """A program that a part runs failed; the text is the end of its output."""


@dataclass(frozen=True)
class Figure:
    """A measured number."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is within its bounds; a NaN is not."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass(frozen=True)
class Bench:
    """Where the parts run."""

    folder: Path  # for models and data, which parts share
    rehearse: bool  # tiny shapes on a CPU
    steps: int = 20  # that are timed in a run, after those that warm up
    samples: int = 8  # the global batch of these runs
    rounds: int = 2  # beside TRL

    @property
    def device(self) -> torch.device:
        """The first GPU; in a rehearsal the CPU."""
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def num_gpus(self) -> int:
        """GPUs of this machine; a rehearsal has two processes in their place."""
        return 2 if self.rehearse else torch.cuda.device_count()

    def needs_gpus(self, count: int) -> None:
        """Raise ``Skipped`` if the machine has fewer GPUs."""
        if self.num_gpus < count:
            raise Skipped(f"{self.num_gpus} GPU, and the part needs {count}")

    def milliseconds(self, function: Any, repeats: int = 20) -> float:
        """The mean time of ``function``, after as many warm-up calls as a quarter of ``repeats``, at least three."""
        repeats = 1 if self.rehearse else repeats
        for _ in range(0 if self.rehearse else max(3, repeats // 4)):
            function()
        self.synchronise()
        began = time.perf_counter()
        for _ in range(repeats):
            function()
        self.synchronise()
        return (time.perf_counter() - began) / repeats * 1e3

    def synchronise(self) -> None:
        """Wait for the GPU."""
        if not self.rehearse:
            torch.cuda.synchronize()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of ``exact``, both in float64."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    return ((found - exact).norm() / exact.norm()).item()


def train(
    output: Path, num_rows: int, config: str = "single", num_processes: int = 1, on_cpu: bool = False, **flags: Any
) -> list[Any]:
    """Train with recipes/finetune.py until it has logged ``num_rows`` steps, and return these rows of metrics.jsonl.

    Then the run is killed: nothing is saved, which would take longer than the steps of a large model. ``on_cpu`` hides
    the GPUs from it.

    Raises:
        Skipped: the kit refuses the run (status 2), for example because it does not fit; with what it says.
        Broken: the run fails.
    """
    flags = {
        "output_dir": output,
        "save_steps": 0,
        "eval_strategy": "no",
        "logging_steps": 1,
        "max_steps": 10**6,
        "num_train_epochs": None,
        "overwrite_output_dir": "true",
    } | flags
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), "--config", config]
    command += ["--num_processes", str(num_processes), *words]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    log = output.with_suffix(".log")
    shutil.rmtree(output, ignore_errors=True)  # rows of a run before would count as those of this one
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        while (ended := process.poll()) is None and len(rows := logged(output)) < num_rows:
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun and its workers
            process.wait()
    if ended is not None:
        text = log.read_text()[-2000:]
        problem = text[text.find("error:") :] if "error:" in text else text
        raise Skipped(f"refused: {' '.join(problem.split())}") if ended == 2 else Broken(text)
    return rows[:num_rows]


def logged(output: Path) -> list[Any]:
    """The complete rows of training steps that a run has logged so far."""
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def worst_difference(rows: list[Any], reference: list[Any]) -> float:
    """The largest relative difference of a loss."""
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(rows, reference, strict=True))
