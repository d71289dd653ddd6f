"""Checks of all ranks: join, compare code and settings, time an all-reduce; with sequence parallelism an all-to-all.

Promises: a rank that does not answer within the time-out is named.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kit.strategy.launch.launch import LaunchPlan, forget_launcher
from kit.system.console import is_main, rank
from kit.system.errors import Problem, TrainingError, UserError
from kit.system.phases import Phase
from kit.tools.doctor.result import Report

if TYPE_CHECKING:
    import torch

    from kit.model.layers.sequence_group import SequenceGroup

# Delay of other ranks before they report that ranks did not join: rank 0, which knows the ranks, reports first.
_REPORT_DELAY_SECONDS = 3.0
NO_ANSWER_FIX = "see the output of that rank, and check its machine and the network; --timeout waits longer"
WRONG_SUM_FIX = "try NCCL_P2P_DISABLE=1, then another GPU, cable or driver"
NUM_VALUES = 1 << 23  # float32, 32 MiB: more than DDP's bucket of 25 MB
_REPEATS = 3  # of which the fastest counts: the first one opens connections


def check_ranks(
    report: Report, planned: LaunchPlan, timeout_seconds: float, end: Callable[[], int], late_seconds: float = 0
) -> None:
    """Make all checks that need every rank, and sum up their results in ``report``. Called by all ranks.

    If a rank does not answer, ``report`` gets a failed result that names it. If this process is stuck in a collective,
    it ends.

    Args:
        report: of this rank. Common results are added on rank 0.
        timeout_seconds: how long to wait for a rank that does not answer.
        end: called before this process ends by itself; returns the exit status.
        late_seconds: how much longer to wait until all have joined.
    """
    from accelerate.utils import gather_object

    from kit.failures.watch import Watch
    from kit.run.facts import OWN_OF_MACHINE, compared_facts
    from kit.strategy.accelerator import start
    from kit.strategy.processes.rendezvous import open_store

    def fail(message: str) -> None:
        found = message.replace("--ddp_timeout", "--timeout")
        report.add(stage, "fail", str(Problem(f"rank {rank()}", found, fix=NO_ANSWER_FIX)))

    def leave(message: str) -> int:
        fail(message)
        return end()

    stage = "ranks"
    recipe = planned.recipe.model_copy(update={"report_to": [], "ddp_timeout": timeout_seconds + late_seconds})
    topology = planned.topology
    forget_launcher(topology)
    began = time.monotonic()
    try:
        settings = planned.recipe.model_dump(mode="json", exclude=OWN_OF_MACHINE)
        accelerator, load_plan = start(recipe, topology, compared_facts(settings, topology, {}))
    except UserError as error:  # ranks that differ, or an address
        if is_main():
            report.add(stage, "fail", "\n".join(map(str, error.problems)))
        return
    except TrainingError as error:
        time.sleep(0 if is_main() else _REPORT_DELAY_SECONDS)
        fail(str(error))
        return
    watch = Watch(accelerator, open_store(), timeout_seconds, trains=False, report=leave)
    if is_main():
        found = f"{accelerator.num_processes} joined in {time.monotonic() - began:.1f} s, with the same code and recipe"
        report.add(stage, "ok", found)
    stage = "all-reduce"
    watch.enter(Phase("in all-reduce"))
    try:
        found, is_right = check_all_reduce(accelerator.device)
        if not is_right:
            report.add(stage, "fail", str(Problem(f"rank {rank()}", found, fix=WRONG_SUM_FIX)))
        elif is_main():
            report.add(stage, "ok", found)
        if load_plan.sequence_group:
            stage = "all-to-all"
            watch.enter(Phase("in all-to-all"))
            found = time_all_to_all(accelerator.device, load_plan.sequence_group)
            if is_main():
                report.add(stage, "ok", found)
        report.counts = sum(gather_object([report.counts]), Counter())
    except (RuntimeError, TrainingError) as error:
        fail(str(watch.explain(error) or error).splitlines()[0])


def time_all_to_all(device: "torch.device", group: "SequenceGroup") -> str:
    """Time an all-to-all in the sequence-parallel group, and return the result. Called by all ranks."""
    import torch
    from torch import distributed

    values = torch.ones(NUM_VALUES // group.size * group.size, device=device)
    received = torch.empty_like(values)
    fastest = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        distributed.all_to_all_single(received, values, group=group.group)
        received.sum().item()  # waits for the device
        fastest = min(fastest, time.perf_counter() - began)
    rate = values.nbytes * (group.size - 1) / group.size / fastest
    return f"{values.nbytes >> 20} MiB among {group.size} in {1e3 * fastest:.2f} ms: {rate / 1e9:.2f} GB/s"


def check_all_reduce(device: "torch.device") -> tuple[str, bool]:
    """All-reduce values. Returns its time, or the error; and whether the sums are right. Called by all ranks."""
    import torch
    from torch import distributed

    own, world = distributed.get_rank(), distributed.get_world_size()
    fastest = float("inf")
    for _ in range(_REPEATS):
        values = torch.full((NUM_VALUES,), float(own), device=device)
        began = time.perf_counter()
        distributed.all_reduce(values)
        wrong = int((values != world * (world - 1) / 2).sum())  # waits for the device
        fastest = min(fastest, time.perf_counter() - began)
        if wrong:
            return f"{wrong:,} of {NUM_VALUES:,} sums are wrong", False
    # Bus bandwidth, as nccl-tests define it.
    rate = 4 * NUM_VALUES * 2 * (world - 1) / world / fastest
    return f"{4 * NUM_VALUES >> 20} MiB in {1e3 * fastest:.2f} ms: {rate / 1e9:.2f} GB/s", True
