"""``--profile_steps``: what the first steps of a start spend their time and memory on, in ``profile/`` of the run.

Promises: losses and weights are those of a run without it. A run without it has nothing of it: no synchronisation, no
call in the loop. Rank 0 alone is watched, and writes

- ``step-XXXXXXXX-rank0.json.gz``: a trace in Chrome's format, which https://ui.perfetto.dev shows. Its name has the
  first step in it,
- ``operations.txt``: the operations that take longest,
- on a GPU of CUDA ``memory-step-XXXXXXXX-rank0.pickle``: each allocation with its stack, for
  https://pytorch.org/memory_viz.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from kit.console import say
from kit.run.record import PROFILE_FOLDER

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.train.step import StepResult

WARM_UP_STEPS = 2  # which make the optimiser's state, and choose or compile kernels
NUM_OPERATIONS = 30  # of the table
MOST_ALLOCATIONS = 1_000_000  # kept of the allocator's history, the last ones

Step = Callable[..., "StepResult"]


def profiled(step: Step, accelerator: "Accelerator", num_steps: int, steps: range, output_dir: Path) -> Step:
    """Return ``step`` as it is, or as one that records what happens from its third call on.

    What lies between two steps is recorded too: reading data, the log, an evaluation, a save.

    Args:
        step: ``kit.train.step.train_step``.
        num_steps: to profile; 0: none.
        steps: of this start, from 0. It is called once for each of them, unless the run is stopped.
        output_dir: of the run.
    """
    profiled_steps = steps[WARM_UP_STEPS:][:num_steps]
    if num_steps and not profiled_steps:
        say(f"warning: --profile_steps: {len(steps)} steps are left, and the first {WARM_UP_STEPS} are not profiled")
    if not profiled_steps or not accelerator.is_main_process:
        return step
    profiler = _Profiler(accelerator.device, output_dir / PROFILE_FOLDER, profiled_steps)
    calls = iter(steps)

    def recording_step(*args: Any, **kwargs: Any) -> "StepResult":
        number = next(calls)
        if number == profiled_steps.start:
            profiler.start()
        result = step(*args, **kwargs)
        if number in profiled_steps and (number == profiled_steps[-1] or result.stop):
            say(*profiler.write(number + 1))
        return result

    return recording_step


class _Profiler:
    """torch's profiler, and on CUDA the history of its allocator."""

    def __init__(self, device: torch.device, folder: Path, steps: range) -> None:
        self._folder = folder
        self._first = steps.start + 1  # counted from 1, as in metrics.jsonl
        self._on_cuda = device.type == "cuda"
        # A backend that torch's profiler does not know is seen from the host only.
        known = ProfilerActivity.__members__.get(device.type.upper(), ProfilerActivity.CPU)
        self._profile = torch.profiler.profile(activities={ProfilerActivity.CPU, known})
        self._has_device = known != ProfilerActivity.CPU

    def start(self) -> None:
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile.start()

    def write(self, last: int) -> list[str]:
        """Stop after step ``last``, counted from 1, and write all files. Returns lines that say what was written."""
        if self._has_device:
            torch.accelerator.synchronize()  # what the last step has launched belongs to it
        self._profile.stop()
        self._folder.mkdir(exist_ok=True)
        name = f"step-{self._first:08d}-rank0"
        trace, table = self._folder / f"{name}.json.gz", self._folder / "operations.txt"
        self._profile.export_chrome_trace(str(trace))
        by = f"self_{'device' if self._has_device else 'cpu'}_time_total"
        table.write_text(self._profile.key_averages().table(sort_by=by, row_limit=NUM_OPERATIONS), encoding="utf-8")
        lines = [
            f"profile of steps {self._first} to {last}: {trace}, which https://ui.perfetto.dev shows",
            f"    {table}: the operations that take longest",
        ]
        if self._on_cuda:
            memory = self._folder / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
            lines.append(f"    {memory}: allocations, which https://pytorch.org/memory_viz shows")
        return lines
