"""The ``kit`` command: small tools around the recipes, and the recipes' scripts themselves.

Each of ``COMMANDS`` is a module of this package. It has ``HELP``, its line in the list of commands; ``USAGE``, unless
its parser writes that; and ``run``, which takes the remaining words of the command line and returns the exit status. It
is imported when it is called; torch and other slow packages are imported inside ``run``. ``kit.cli.scripts`` starts the
scripts.
"""

import os
import sys

from kit.system import interrupt

if os.path.basename(sys.argv[0]) in ("kit", "main.py"):
    interrupt.leave_on_ctrl_c()  # also while the imports below run

import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kit import __version__
from kit.system.console import guard_libraries, show, show_error
from kit.system.errors import Problem, UserError, did_you_mean

SCRIPTS = "train score sample export".split()
COMMANDS = "chat push recipes schema convert doctor plan inspect report cache verify-resume".split()
SLOW_TO_IMPORT = "chat doctor inspect".split()


def main(argv: list[str] | None = None) -> int:
    """Run one command. ``SCRIPTS`` replace this process.

    Args:
        argv: the words after ``kit``; None: those of this process.

    Returns:
        The exit status: that of the command, 2 for a mistake of the user, 1 for a failure, 130 for Ctrl-C.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        lines = [f"  {command:<14} {meaning}" for command, meaning in meanings().items()]
        from kit.config.paths import ROOT

        if Path.cwd() != ROOT:
            lines += ["", f"recipes/ and docs/ are in {ROOT}"]
        show("\n".join(["usage: kit <command> [--help], or kit --version", "", *lines]))
        return 0
    if name in ("-V", "--version", "version"):
        show(f"kit {__version__}")
        return 0
    guard_libraries()
    try:
        if name in SCRIPTS:
            from kit.cli.scripts import start

            start(name, rest)
        if name not in COMMANDS:
            raise UserError(_unknown(name))
        command = _module(name)
        if {"-h", "--help"} & set(rest) and hasattr(command, "USAGE"):  # else its parser answers
            show(command.USAGE)
            return 0
        if name not in SLOW_TO_IMPORT:  # these call it themselves
            interrupt.raise_on_ctrl_c()
        status: int = command.run(rest)
        return status
    except KeyboardInterrupt:
        interrupt.report("stopped by Ctrl-C")
        return interrupt.STATUS
    except UserError as error:
        show_error(str(error))
        return error.exit_status
    except (SystemExit, GeneratorExit):
        raise
    except BaseException:  # libraries in Rust raise one that is no Exception
        show_error(traceback.format_exc())
        return 1


def meanings() -> dict[str, str]:
    """Return what each command is for, in the order of the list that ``kit --help`` shows."""
    from kit.cli.scripts import HELP

    return HELP | {command: _module(command).HELP for command in COMMANDS}


def _module(command: str) -> ModuleType:
    return import_module(f"kit.cli.{command.replace('-', '_')}")


def _unknown(name: str) -> Problem:
    names = (*SCRIPTS, *COMMANDS)
    return Problem(f"kit {name}", "unknown command", ", ".join(names), did_you_mean(name, names))


if __name__ == "__main__":
    sys.exit(main())
