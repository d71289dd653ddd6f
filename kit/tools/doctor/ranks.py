"""What each rank does: join, compare machines, run the collectives, and train a step of a tiny model.

Run as a script by ``kit.tools.doctor.starting``, under the kit's launcher, or called by every rank of the user's own.

Promises: no rank waits longer than the time-out without a result that names who did not answer; whatever the
libraries do, the process ends after ``hard_limit``.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not this folder: its modules would hide others

from kit.config.command_line import read_command_line
from kit.config.recipe import Recipe
from kit.console import is_main, rank, show, show_error
from kit.errors import TrainingError, UserError, raise_if
from kit.failures import exits
from kit.phases import Phase
from kit.strategy.launch import LaunchPlan, forget_launcher, plan_launch
from kit.strategy.topology import Topology
from kit.tools.doctor.result import Report, Result, ok

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

# What a rank other than 0 waits before it reports that ranks did not join: rank 0, which knows which, reports first.
_REPORT_DELAY_SECONDS = 3.0
NO_ANSWER_FIX = "see what that rank printed, and whether its machine runs and is reached; --timeout waits longer"


def hard_limit(timeout_seconds: float) -> float:
    """Return the seconds after which a rank ends whatever happens: the time-out three times, and a minute of work."""
    return 3 * timeout_seconds + 60


class Deadline:
    """Ends this process after ``hard_limit``, since a library may ignore its own time-out."""

    def __init__(self, limit_seconds: float, end: Callable[[str], int]) -> None:
        """
        Args:
            end: called with what happened; returns the exit status.
        """
        self.stage = "ranks"  # name of the check that this rank is in
        self._limit_seconds = limit_seconds
        self._end = end
        self._timer = threading.Timer(limit_seconds, self._leave)
        self._timer.daemon = True
        self._timer.start()

    def _leave(self) -> None:
        os._exit(self._end(f"no end after {self._limit_seconds:.0f} s"))

    def cancel(self) -> None:
        """Let this process live on: this rank has done its checks."""
        self._timer.cancel()


def check_ranks(
    report: Report, planned: LaunchPlan, timeout_seconds: float, end: Callable[[], int], late_seconds: float = 0
) -> list[list[Result]]:
    """Make all checks that need every rank. Called by all ranks.

    If a rank does not answer, ``report`` gets a failed result that names it. This process then ends, if it cannot
    return from a collective.

    Args:
        report: of this rank. What all find together is added on rank 0.
        timeout_seconds: how long to wait for a rank that does not answer.
        end: called before this process ends by itself; returns the exit status.
        late_seconds: how much longer to wait until all have joined.

    Returns:
        The results of each rank; empty if a rank did not answer.
    """
    from accelerate.utils import gather_object

    from kit.failures.ranks import Watch
    from kit.strategy.accelerator import start
    from kit.strategy.rendezvous import open_store

    def fail(message: str) -> None:
        found = message.replace("--ddp_timeout", "--timeout")
        report.add(Result(deadline.stage, "fail", f"rank {rank()}: {found}", NO_ANSWER_FIX))

    def leave(message: str) -> int:
        fail(message)
        return end()

    join_seconds = timeout_seconds + late_seconds
    deadline = Deadline(hard_limit(join_seconds), leave)
    recipe = planned.recipe.model_copy(update={"report_to": [], "ddp_timeout": join_seconds})
    # The tiny model has no layer of the config's names, and its weights are the same on every rank.
    topology = replace(planned.topology, layer_classes=(), load_on_rank0=False)
    forget_launcher(topology)
    began = time.monotonic()
    try:
        accelerator, _ = start(recipe, topology)
    except (TrainingError, UserError) as error:
        time.sleep(0 if is_main() else _REPORT_DELAY_SECONDS)
        fail(str(error))
        deadline.cancel()
        return []
    watch = Watch(accelerator, open_store(), timeout_seconds, trains=False, report=leave)

    def begin(stage: str, doing: str) -> None:
        deadline.stage = stage
        watch.enter(Phase(doing))

    results: list[list[Result]] = []
    try:
        for result in _results(accelerator, recipe, topology, begin, time.monotonic() - began):
            if is_main():
                report.add(result)
        results = gather_object([report.results])
    except (RuntimeError, TrainingError) as error:
        fail(str(watch.explain(error) or error).splitlines()[0])
    deadline.cancel()
    return results


def _results(
    accelerator: "Accelerator", recipe: Recipe, topology: Topology, begin: Callable[[str, str], None], seconds: float
) -> Iterator[Result]:
    """Run the checks one after the other. Called by all ranks.

    Args:
        begin: called with the name of a check, and what this rank begins to do for it.
        seconds: how long the ranks took to join.
    """
    import torch
    from accelerate.utils import gather_object

    from kit.strategy.accelerator import prepare
    from kit.tools.doctor import collectives, hosts

    where = gather_object([hosts.own_host()])
    num_hosts = len(set(where))
    yield ok("ranks", f"{len(where)} on {num_hosts} machine{'s' if num_hosts > 1 else ''} joined in {seconds:.1f} s")
    begin("machines", "comparing machines")
    device = accelerator.device
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    yield hosts.compare_facts(gather_object([hosts.machine_facts(recipe, name)]), where)
    accelerator.wait_for_everyone()
    yield hosts.compare_clocks(gather_object([time.time()]), where)
    measured: dict[str, tuple[float, float]] = {}
    for name in collectives.COLLECTIVES:
        yield collectives.check_collective(name, device, partial(begin, name), measured)
    if is_main() and "all-reduce" in measured:
        begin("a step", "estimating a step")
        yield _estimate(recipe, topology, device, *measured["all-reduce"])
    begin("gradients", "training a tiny model")
    model = collectives.TinyModel()
    prepared = prepare(accelerator, topology, model, torch.optim.SGD(model.parameters(), lr=0.0))
    yield collectives.check_gradients(prepared, gather_object)


def _estimate(recipe: Recipe, topology: Topology, device: "torch.device", latency: float, rate: float) -> Result:
    from kit.tools.doctor.links import check_step

    try:
        return check_step(recipe, topology, device, latency, rate)
    except UserError:  # the model cannot be opened: the line of the model says so
        return Result("a step", "warn", "its communication is not estimated: the model could not be opened")


def main(argv: list[str]) -> int:
    """Do this rank's part. Its results go to standard output, each a line of JSON.

    Args:
        argv: the time-out in seconds, then the flags of the recipe.
    """
    report = Report(lambda result: show(json.dumps(asdict(result))))
    try:
        planned = plan_launch(read_command_line(argv[1:]))
        raise_if(planned.problems)
    except UserError as error:
        show_error(str(error))
        return error.exit_status
    check_ranks(report, planned, float(argv[0]), lambda: report.exit_status)
    return report.exit_status


if __name__ == "__main__":
    with exits.reporting_errors():
        exits.leave(main(sys.argv[1:]))
