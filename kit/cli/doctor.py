"""``kit doctor``: check a machine, and a planned run on it, in seconds.

Without a launcher, it starts the ranks of a distributed run itself. Under a launcher, the first rank of each machine
checks that machine, and all ranks are compared.
"""

import socket

from kit.config.command_line import Request, read_command_line
from kit.failures import exits
from kit.strategy.launch.launch import plan_launch, resolve_config
from kit.strategy.launch.torchrun import torchrun_command
from kit.strategy.processes.launcher import LaunchedRank, launched_rank
from kit.strategy.strategies import SINGLE
from kit.system import interrupt
from kit.system.console import Parser, is_main, show
from kit.system.errors import Problem, UserError, raise_if
from kit.tools.doctor.result import Report

HELP = "check this machine and a planned run before it starts"
TIMEOUT_SECONDS = 60.0
# How much later rank 0 may come than ranks that check no machine: it imports more, and its machine may be slow.
_LATE_SECONDS = 120.0
_SHUTDOWN_SECONDS = 2  # for ranks after the launcher's SIGTERM

USAGE = f"""usage: kit doctor [--config C] [--recipe R] [--timeout SECONDS] [--flag value ...]

{HELP[0].upper()}{HELP[1:]}. Each line is ok, warn or fail, and says what to do.

  --timeout SECONDS  how long to wait for a rank (default: {TIMEOUT_SECONDS:.0f})

Takes the flags of recipes/finetune.py; without any, it checks what the recipe tiny needs. On each of several machines:
torchrun --nnodes 2 ... -m kit.cli.main doctor --config C, or accelerate launch ... -m kit.cli.main doctor ...
Exit status: 0 if nothing failed, 2 if something did."""


def run(argv: list[str]) -> int:
    """Make all checks, and return 0, or 2 if one failed; or become a launcher.

    Raises:
        UserError: with all problems of the flags.
    """
    parser = Parser(prog="kit doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS)
    own, words = parser.parse_known_args(argv)
    request = read_command_line(words)
    if not 1 <= own.timeout < 86400:
        raise UserError(Problem("--timeout", f"found {own.timeout:g}", "seconds from 1"), *request.problems)
    launched = launched_rank()
    if launched and launched.world > 1:
        with exits.reporting_errors():
            exits.leave(_run_as_rank(request, launched, own.timeout))
    resolve_config(request, checks_batch=False)  # mistyped flags are reported before torch is imported
    planned = plan_launch(request)
    interrupt.raise_on_ctrl_c()
    num_processes = planned.topology.num_processes
    if planned.topology.strategy != SINGLE and planned.config.num_machines == 1 and not planned.problems:
        show(f"starting {num_processes} ranks")
        words = ["-m", "kit.cli.main", "doctor", *argv]
        keeps = not request.launch.config
        interrupt.become(*torchrun_command(words, num_processes, _SHUTDOWN_SECONDS, keep_environment=keeps))
    from kit.tools.doctor.machine import check_machine

    report = Report()
    check_machine(report, planned, None)
    return report.end()


def _run_as_rank(request: Request, launched: LaunchedRank, timeout_seconds: float) -> int:
    """Make the checks of this rank. Returns the exit status, equal on all ranks.

    The first rank of a machine prints what it finds there; rank 0 also prints what all ranks find together, and counts.
    """
    resolve_config(request, checks_batch=False)
    from kit.tools.doctor.collectives import check_ranks
    from kit.tools.doctor.machine import check_machine

    interrupt.raise_on_ctrl_c()

    host = socket.gethostname() if launched.several_machines else ""
    report = Report(host, shows=launched.local_rank == 0)
    planned = plan_launch(request)
    raise_if(planned.problems)
    if launched.local_rank == 0:
        check_machine(report, planned, launched)

    def end() -> int:
        return report.end() if is_main() else report.exit_status

    check_ranks(report, planned, timeout_seconds, end, 0 if is_main() else _LATE_SECONDS)
    return end()
