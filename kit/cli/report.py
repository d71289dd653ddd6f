"""``kit report``: write the report of a run, or of several beside each other, also while they run."""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kit.console import Parser, show
from kit.durable import read_small
from kit.errors import Problem, Problems, UserError
from kit.run.record import RUN_FILE
from kit.visible import joined, one_line

if TYPE_CHECKING:
    from kit.tools.report.runs import ReportedRun

HELP = "write the report of a run as far as it has come, or compare several runs"
RUNS = Path("runs")  # where runs are unless --output_dir says otherwise
COMPARISON = "comparison.html"
SECONDS = 5.0  # between two writings


def run(argv: list[str]) -> int:
    """Write the page of one run into its folder, or that of several runs beside them; or either into ``--output``.

    Raises:
        UserError: a folder holds no run or no metrics, or the page cannot be written.
    """
    parser = Parser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    what = f"output_dir of a run, or a folder of runs to compare; default: {RUNS}"
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help=what)
    output = f"the page; default: report.html in the run's folder, of several runs {COMPARISON} beside the first"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    watch = f"write it again every SECONDS seconds until the runs end; default: {SECONDS:g}"
    parser.add_argument("--watch", nargs="?", type=_seconds, const=SECONDS, default=0.0, metavar="SECONDS", help=watch)
    options = parser.parse_args(argv)
    if not options.runs and not RUNS.is_dir():
        expected = "the output_dir of a run, or a folder of runs"
        raise UserError(Problem("RUN", f"none is given, and there is no folder {RUNS} here", expected))
    folders = _runs_of(options.runs or [RUNS])
    path = options.output or (folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / COMPARISON)
    _check_output(path)
    runs = _write(folders, path, options.watch)
    if options.watch:
        until = f"written every {options.watch:g} s until the end of the run; Ctrl-C ends this"
        show(f"report: {one_line(str(path))}, {until}")
        try:
            while any(each.is_at_work for each in runs):
                time.sleep(options.watch)
                runs = _write(folders, path, options.watch)
        except KeyboardInterrupt:
            pass
        runs = _write(folders, path)  # the page no longer loads itself again
    if len(runs) > 1:
        show(joined(_as_text(runs)))
    show(f"report: {one_line(str(path))}")
    return 0


def _write(folders: list[Path], path: Path, reload_seconds: float = 0.0) -> "list[ReportedRun]":
    """Write the page, and return the runs as they were read. Raises ``UserError`` with the problems of all runs."""
    from kit.tools.report.page import write_page
    from kit.tools.report.run_page import report_page
    from kit.tools.report.runs import read_reported_run

    problems, runs = Problems(), []
    for folder in folders:
        with problems.caught():
            runs.append(read_reported_run(folder))
    problems.raise_if_any()
    write_page(path, report_page(runs, reload_seconds))
    return runs


def _as_text(runs: "list[ReportedRun]") -> list[str]:
    """The results of several runs, and how they differ, for a terminal."""
    from kit.tools.report.data_tables import text_table
    from kit.tools.report.run_page import differences, results, verdict

    differing = text_table(differences(runs)) or ["  nothing differs"]
    return [*text_table(results(runs)), "", *differing, "", one_line(verdict(runs))]


def _runs_of(folders: list[Path]) -> list[Path]:
    """The runs to report: of a folder of runs, all of them; without pages of the kit, as ``runs/*`` has them.

    Raises:
        UserError: there is none, or one is given twice.
    """
    runs: list[Path] = []
    for folder in folders:
        if folder.is_file() and _is_page(folder):
            continue
        above = [folder, *Path(os.path.realpath(folder)).parents[:2]]  # of final/ or a checkpoint
        run = next((each for each in above if (each / RUN_FILE).is_file()), None)
        files = [] if run else sorted(folder.glob(f"*/{RUN_FILE}"), reverse=True)
        inside = {os.path.realpath(file.parent): file.parent for file in files}  # one that a link names too is once
        runs += sorted(inside.values()) or [run or folder]
    if not runs:
        raise UserError(Problem("RUN", "pages only", "the output_dir of a run, or a folder of runs"))
    resolved = [os.path.realpath(run) for run in runs]  # of links in a circle too
    if twice := [run for i, run in enumerate(runs) if resolved[i] in resolved[:i]]:
        raise UserError(Problem("RUN", f"{twice[0]} is given twice", "each run once"))
    return runs


def _check_output(path: Path) -> None:
    """Refuse to overwrite a file that is not a page of the kit."""
    try:
        if path.is_dir() or (path.exists() and not _is_page(path)):
            raise UserError(Problem("--output", f"{path} exists, and is not a report", "a new file, or a report"))
    except OSError as error:
        raise UserError(Problem("--output", f"{path} cannot be read ({error.strerror})")) from None


def _is_page(path: Path) -> bool:
    from kit.tools.report.page import GENERATOR

    return GENERATOR in read_small(path, errors="replace")[:2000]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 (name the runs before --watch)")
    return seconds
