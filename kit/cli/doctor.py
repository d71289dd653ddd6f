"""``kit doctor``: check this machine, and a run that is planned on it, in seconds.

Without a launcher it starts the ranks of a distributed run itself. Under `torchrun` or `accelerate launch` every rank
calls it: the first rank of each machine checks that machine, and all machines are compared.
"""

import socket

from kit import interrupt
from kit.config.command_line import Request, read_command_line
from kit.console import Parser, is_main, show, show_error
from kit.errors import Problem, UserError, raise_if
from kit.failures import exits
from kit.strategy.launch import plan_launch, resolve_config
from kit.strategy.launcher import LaunchedRank, launched_rank
from kit.strategy.strategies import SINGLE
from kit.tools.doctor.result import FAILED, Report, Result

HELP = "check this machine, and a run planned on it, before it costs anything"
TIMEOUT_SECONDS = 60.0
# How much later rank 0 may come than ranks that check no machine: it imports more, and its machine may be slow.
_LATE_SECONDS = 120.0

USAGE = f"""usage: kit doctor [--config C] [--recipe R] [--timeout SECONDS] [--flag value ...]

{HELP[0].upper()}{HELP[1:]}. Each line is ok, warn or fail, and says what to do.

  --timeout SECONDS  give up on a rank that does not answer in this time (default: {TIMEOUT_SECONDS:.0f})

Takes the flags of recipes/finetune.py; without any, it checks what the recipe tiny needs. On each of several machines:
torchrun --nnodes 2 ... -m kit.cli.main doctor --config C, or accelerate launch ... -m kit.cli.main doctor ...
Exit status: 0 if nothing failed, 2 if something did."""


def run(argv: list[str]) -> int:
    """Make all checks, and return 0, or 2 if one failed. Raises ``UserError`` with all problems of the flags."""
    if {"-h", "--help"} & set(argv):
        show(USAGE)
        return 0
    parser = Parser(prog="kit doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--timeout", default=TIMEOUT_SECONDS)
    own, words = parser.parse_known_args(argv)
    request = read_command_line(words)
    try:
        timeout_seconds = float(own.timeout)
    except ValueError:
        timeout_seconds = 0.0
    if not 1 <= timeout_seconds < 86400:
        raise UserError(Problem("--timeout", f"found {own.timeout!r}", "seconds from 1"), *request.problems)
    launched = launched_rank()
    if launched and launched.world > 1:
        with exits.reporting_errors():
            exits.leave(_run_as_rank(request, launched, timeout_seconds))
    resolve_config(request, checks_batch=False)  # mistyped flags are reported before torch is imported
    report = Report(lambda result: show(str(result)))
    planned = plan_launch(request)
    from kit.tools.doctor.machine import check_machine

    interrupt.raise_on_ctrl_c()
    check_machine(report, planned, None)
    if planned.topology.strategy != SINGLE and planned.config.num_machines == 1 and not planned.problems:
        from kit.tools.doctor.ranks import start_ranks

        num_processes = planned.topology.num_processes
        show(f"      starting {num_processes} ranks")
        if failed := start_ranks(words, num_processes, timeout_seconds, bool(request.launch.config)):
            report.add(failed)
    return report.end()


def _run_as_rank(request: Request, launched: LaunchedRank, timeout_seconds: float) -> int:
    """Make the checks of this rank, which a launcher of the user started. Returns the exit status, equal on all ranks.

    The first rank of a machine prints what it finds there; rank 0 also prints what all ranks find together.
    """
    resolve_config(request, checks_batch=False)
    from kit.tools.doctor.machine import check_machine
    from kit.tools.doctor.ranks import check_ranks

    interrupt.raise_on_ctrl_c()

    def report_result(result: Result) -> None:
        if result.status == "fail" and not is_main():
            show_error(str(result))
        elif launched.local_rank == 0:
            show(str(result))

    report = Report(report_result, socket.gethostname() if launched.several_machines else "")
    planned = plan_launch(request)
    raise_if(planned.problems)
    if launched.local_rank == 0:
        check_machine(report, planned, launched)

    def end() -> int:
        return report.end() if is_main() else report.exit_status

    everyones = check_ranks(report, planned, timeout_seconds, end, 0 if is_main() else _LATE_SECONDS)
    if is_main():
        for result in (result for results in everyones[1:] for result in results):
            report.results.append(result)
            if result.status != "ok" and result.host != socket.gethostname():
                show(str(result))
    status = end()
    any_failed = any(result.status == "fail" for results in everyones for result in results)
    return FAILED if any_failed else status
