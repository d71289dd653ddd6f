"""``kit doctor``: check this machine, and a run that is planned on it, in seconds.

Without a launcher it starts the ranks of a distributed run itself. Under `torchrun` or `accelerate launch` every rank
calls it: each machine is checked by its first rank, and all of them together are compared.
"""

from kit.config.command_line import read_command_line, read_flags
from kit.console import is_main, say, show
from kit.errors import Problem, UserError, raise_if

HELP = "check this machine, and a run planned on it, before it costs anything"
TIMEOUT_SECONDS = 60.0
# Of machines in a multi-machine launch: reading libraries from a slow disk, and their own checks.
_LATE_SECONDS = 120.0

USAGE = f"""usage: kit doctor [--config C] [--recipe R] [--json] [--timeout SECONDS] [--flag value ...]

{HELP[0].upper()}{HELP[1:]}. Each line is ok, warn or fail, with the cure.

  --json             print one JSON object at the end instead of lines
  --timeout SECONDS  give up on a rank that does not answer for so long (default: {TIMEOUT_SECONDS:.0f})

Takes the flags of recipes/finetune.py; without any, the recipe is tiny. On several machines, on each of them:
torchrun --nnodes 2 ... -m kit.cli.main doctor --config C, or accelerate launch ... -m kit.cli.main doctor ...
Exit status: 0 if nothing failed, else 2."""


def run(argv: list[str]) -> int:
    """Make all checks, and return 0, or 2 if one failed. Raises ``UserError`` with all problems of the flags."""
    if {"-h", "--help"} & set(argv):
        show(USAGE)
        return 0
    words, as_json, timeout_seconds = _own_flags(argv)
    request = read_command_line(words)

    from kit.doctor.result import Report
    from kit.doctor.versions import check_versions
    from kit.strategy.launch import look
    from kit.strategy.launcher import launched_rank

    launched = launched_rank()
    if launched and launched.world > 1:
        return _run_as_rank(request, as_json, timeout_seconds)
    raise_if(request.problems)
    report = Report(lambda result: None if as_json else show(str(result)))
    report.run("versions", check_versions)
    planned = look(request)

    from kit.doctor.machine import check_machine

    check_machine(report, planned, None)
    if planned.topology.strategy != "single" and not planned.problems:
        from kit.doctor.starting import start_ranks

        if not as_json:
            say(f"      starting {planned.topology.num_processes} ranks ...")
        start_ranks(report, words, planned.topology.num_processes, timeout_seconds, bool(request.launch.config))
    return report.end(as_json)


def _run_as_rank(request: "object", as_json: bool, timeout_seconds: float) -> int:
    ...


def _own_flags(argv: list[str]) -> tuple[list[str], bool, float]:
    """Take this command's own flags out of ``argv``. Returns the other words, ``--json`` and ``--timeout``."""
    words, as_json, text = [], False, str(TIMEOUT_SECONDS)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name == "--json" and not has_value:
            as_json = True
        elif name == "--timeout":
            text = value if has_value else rest.pop(0) if rest and not rest[0].startswith("--") else ""
        else:
            words.append(word)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 86400:
        found = f"found {text!r}" if text else "no value"
        raise UserError(Problem("--timeout", found, "seconds from 1"), *read_command_line(words).problems)
    return words, as_json, seconds
