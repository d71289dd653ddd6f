"""The ``kit`` command: small tools around the recipes.

Each command is a module of this package. It has ``HELP``, its line in the list of commands, and ``run``, which takes
the remaining words of the command line and returns the exit status. Its import must be fast: torch and other slow
packages are imported inside ``run``.
"""

import sys
import traceback
from types import ModuleType

from kit.cli import cache, doctor, inspect, plan, prepare, recipes, report, verify_resume
from kit.console import guard_libraries, show, show_error
from kit.errors import Problem, UserError, did_you_mean

COMMANDS: dict[str, ModuleType] = {
    "recipes": recipes,
    "doctor": doctor,
    "plan": plan,
    "inspect": inspect,
    "prepare": prepare,
    "report": report,
    "cache": cache,
    "verify-resume": verify_resume,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``kit``; None: those of this process.

    Returns:
        The exit status: that of the command, 2 for a mistake of the user, 1 for a failure, 130 for Ctrl-C.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        lines = [f"  {command:<14} {module.HELP}" for command, module in COMMANDS.items()]
        show("\n".join(["usage: kit <command> [--help]", "", *lines]))
        return 0
    guard_libraries()
    try:
        if name not in COMMANDS:
            names = ", ".join(COMMANDS)
            raise UserError(Problem(f"kit {name}", "unknown command", names, did_you_mean(name, COMMANDS)))
        return COMMANDS[name].run(rest)
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        show_error(str(error))
        return error.exit_status
    except (SystemExit, GeneratorExit):
        raise
    except BaseException:  # libraries in Rust raise one that is no Exception
        show_error(traceback.format_exc())
        return 1


if __name__ == "__main__":
    sys.exit(main())
