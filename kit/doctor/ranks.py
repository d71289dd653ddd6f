"""What each rank does: join, compare machines, run the collectives, and train a step of a tiny model.

Run as a script by ``kit.doctor.starting``, under the kit's launcher, or called by every rank of the user's own.

Promises: no rank waits longer than the time-out without a result that names who did not answer; whatever the
libraries do, the process ends after ``hard_limit``.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder: its modules would hide others

from kit.config.command_line import read_command_line
from kit.console import is_main
from kit.doctor.result import FAILED, Report, Result, ok
from kit.errors import TrainingError, UserError, raise_if
from kit.failures import exits
from kit.failures.phases import Phase
from kit.strategy.launch import Planned, forget_launcher, look

# Of which a rank that is not rank 0 is later, so that rank 0, which knows more, tells first.
_LATER_SECONDS = 3.0
CURE = "see what that rank printed, and whether its machine runs and is reached; --timeout waits longer"


def hard_limit(timeout_seconds: float) -> float:
    """Return the seconds after which a rank ends whatever happens: to join, to be watched in vain, and to work."""
    return 3 * timeout_seconds + 60


class Deadline:
    """Ends this process after ``hard_limit``, since a library may ignore its own time-out."""

    def __init__(self, report: Report, timeout_seconds: float) -> None:
        """Start it. ``report`` gets a failed result that says where this rank was."""
        self.stage = "join the others"
        self._report, self._limit = report, hard_limit(timeout_seconds)
        self._timer = threading.Timer(self._limit, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        found = f"no end after {self._limit:.0f} s: this rank waits to {self.stage}"
        self._report.add(Result("ranks", "fail", found, CURE))
        os._exit(FAILED)

    def over(self) -> None:
        """End it: this rank is done."""
        self._timer.cancel()


def check_ranks(report: Report, planned: Planned, timeout_seconds: float, is_late: float = 0) -> list[list[Result]]:
    """Make all checks that need every rank. Called by all ranks; only rank 0 adds results, but for failures to answer.

    Args:
        report: of this rank.
        timeout_seconds: how long to wait for a rank that does not answer.
        is_late: seconds that some ranks come later than others, because they check their machine first.

    Returns:
        The results of all ranks' reports so far. Empty if a rank did not answer; the report then says so.
    """
    from accelerate.utils import gather_object

    from kit.doctor import collectives, hosts
    from kit.failures.ranks import Watch
    from kit.strategy.accelerator import prepare, start
    from kit.strategy.rendezvous import open_store

    deadline = Deadline(report, timeout_seconds + is_late)
    waiting = {"report_to": [], "ddp_timeout": timeout_seconds + is_late}
    recipe = planned.recipe.model_copy(update=waiting)
    topology = replace(planned.topology, layer_classes=(), load_on_rank0=False)  # those of the tiny model
    forget_launcher(topology)
    began = time.monotonic()
    try:
        accelerator, _ = start(recipe, topology)
    except TrainingError as error:
        time.sleep(0 if is_main() else _LATER_SECONDS)
        report.add(Result("ranks", "fail", str(error).replace("--ddp_timeout", "--timeout"), CURE))
        return []

    def unanswered(message: str) -> int:
        report.add(Result(deadline.stage, "fail", message.replace("--ddp_timeout", "--timeout"), CURE))
        return FAILED

    watch = Watch(accelerator, open_store(), timeout_seconds, trains=False, tell=unanswered)

    def at(stage: str, doing: str) -> None:
        deadline.stage = stage
        watch.at(Phase(doing))

    def add(result: Result) -> None:
        if is_main():
            report.add(result)

    try:
        where = gather_object([hosts.own_host()])
        seconds = f"{time.monotonic() - began:.1f} s"
        add(ok("ranks", f"{len(where)} on {len(set(where))} machine{'s' * (len(set(where)) > 1)} joined in {seconds}"))
        at("machines", "comparing machines")
        add(hosts.compare_facts(gather_object([hosts.facts(recipe, _device_name(accelerator))]), where))
        accelerator.wait_for_everyone()
        add(hosts.compare_clocks(gather_object([hosts.now()]), where))
        for name in collectives.COLLECTIVES:
            add(collectives.check_collective(name, accelerator.device, lambda doing, name=name: at(name, doing)))
        at("gradients", "training a tiny model")
        model = collectives.TinyModel()
        import torch

        prepared = prepare(accelerator, topology, model, torch.optim.SGD(model.parameters(), lr=0.0))
        add(collectives.check_gradients(prepared, gather_object))
        results: list[list[Result]] = gather_object([report.results])
    except (RuntimeError, TrainingError) as error:
        explained = watch.explain(error) or error
        report.add(Result(deadline.stage, "fail", str(explained).splitlines()[0], CURE))
        return []
    deadline.over()
    return results


def _device_name(accelerator: "object") -> str:
    import torch

    device = accelerator.device  # type: ignore[attr-defined]
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def main(argv: list[str]) -> int:
    """Do this rank's part. Its results go to standard output, each a line of JSON.

    Args:
        argv: the time-out in seconds, then the flags of the recipe.
    """
    report = Report(lambda result: print(json.dumps(asdict(result)), flush=True))
    try:
        planned = look(read_command_line(argv[1:]))
        raise_if(planned.problems)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    check_ranks(report, planned, float(argv[0]))
    return report.exit_status


if __name__ == "__main__":
    with exits.reporting_errors():
        exits.leave(main(sys.argv[1:]))
