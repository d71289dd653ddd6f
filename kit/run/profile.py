"""``--profile_steps``: what the first steps of a start spend their time on, in ``profile/`` of the run.

Promises: losses and weights are those of a run without it, which has nothing of it: no synchronisation, no call in the
loop. Rank 0 alone is watched. It writes ``step-XXXXXXXX-rank0.json.gz``, a trace in Chrome's format with the first step
in its name, which https://ui.perfetto.dev shows; and ``operations.txt``, the operations that take longest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kit.console import say
from kit.run.record import PROFILE_FOLDER

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.train.step import StepResult

WARM_UP_STEPS = 2  # which make the optimiser's state, and choose or compile kernels
NUM_OPERATIONS = 30  # of the table

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
    traced = steps[WARM_UP_STEPS:][:num_steps]
    if num_steps and not traced:
        say(f"warning: --profile_steps: {len(steps)} steps are left, and the first {WARM_UP_STEPS} are not profiled")
    if not traced or not accelerator.is_main_process:
        return step

    def write(profile: torch.profiler.profile) -> None:
        folder = output_dir / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        trace, table = folder / f"step-{traced.start + 1:08d}-rank0.json.gz", folder / "operations.txt"
        profile.export_chrome_trace(str(trace))
        by = f"self_{'cpu' if accelerator.device.type == 'cpu' else 'device'}_time_total"
        table.write_text(profile.key_averages().table(sort_by=by, row_limit=NUM_OPERATIONS), encoding="utf-8")
        say(f"profile from step {traced.start + 1} on: {trace}, which https://ui.perfetto.dev shows")
        say(f"    {table}: the operations that take longest")

    schedule = torch.profiler.schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=len(traced), repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profile.start()

    def recording_step(*args: Any, **kwargs: Any) -> "StepResult":
        result = step(*args, **kwargs)
        profile.stop() if result.stop else profile.step()
        return result

    return recording_step
