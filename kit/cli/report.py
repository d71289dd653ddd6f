"""``kit report``: write the report of a run, or of several beside each other, also while they run."""

import argparse
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kit.console import Parser, show
from kit.durable import read_small
from kit.errors import Problem, Problems, UserError
from kit.visible import joined, one_line

if TYPE_CHECKING:
    from kit.tools.report.runs import ReportedRun

HELP = "write the report of a run as far as it has come, or compare several runs"
COMPARISON = Path("comparison.html")
SECONDS = 5.0  # between two writings


def run(argv: list[str]) -> int:
    """Write the page of one run into its folder, or that of several runs into ``--output``.

    Raises:
        UserError: a folder holds no run or no metrics, or the page cannot be written.
    """
    parser = Parser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a run")
    output = f"the page; default: report.html in the run's folder, of several runs {COMPARISON} here"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    watch = f"write it again every SECONDS seconds until the runs end; default: {SECONDS:g}"
    parser.add_argument("--watch", nargs="?", type=_seconds, const=SECONDS, default=0.0, metavar="SECONDS", help=watch)
    options = parser.parse_args(argv)
    options.runs = [_run_of(folder) for folder in options.runs]
    from kit.tools.report.run_page import FILE

    _check_twice(options.runs)
    path = options.output or (options.runs[0] / FILE if len(options.runs) == 1 else COMPARISON)
    _check_output(path, is_ours=options.output is None and len(options.runs) == 1)
    runs = _write(options.runs, path, options.watch, needs_steps=not options.watch)
    if options.watch:
        written = f"written every {options.watch:g} s until the end of the run; Ctrl-C ends this"
        show(f"report: {one_line(str(path))}, {written}")
        took = 0.0
        try:
            while any(each.is_at_work for each in runs):
                time.sleep(max(options.watch, took))  # a long run takes seconds to read: leave the machine to it
                began = time.perf_counter()
                runs = _write(options.runs, path, options.watch)
                took = time.perf_counter() - began
        except KeyboardInterrupt:
            pass
        runs = _write(options.runs, path)  # the page no longer loads itself again
    if len(runs) > 1:
        show(joined(_as_text(runs)))
    show(f"report: {one_line(str(path))}")
    return 0


def _write(
    folders: list[Path], path: Path, reload_seconds: float = 0.0, needs_steps: bool = False
) -> "list[ReportedRun]":
    """Write the page, and return the runs as they were read.

    Raises:
        UserError: with the problems of all runs; one without a step is a problem only if ``needs_steps``.
    """
    from kit.tools.report.comparison import comparison_page
    from kit.tools.report.page import write_page
    from kit.tools.report.run_page import run_page
    from kit.tools.report.runs import read_reported_run

    problems, runs = Problems(), []
    for folder in folders:
        with problems.caught():
            runs.append(read_reported_run(folder))
            if needs_steps and not runs[-1].metrics.num_rows:
                raise UserError(Problem(str(folder), "no step is logged yet", fix="--watch waits for the first one"))
    problems.raise_if_any()
    text = run_page(runs[0], reload_seconds) if len(runs) == 1 else comparison_page(runs, reload_seconds)
    write_page(path, text)
    return runs


def _as_text(runs: "list[ReportedRun]") -> list[str]:
    """The results of several runs, and how they differ, for a terminal."""
    from kit.tools.report.comparison import EVALUATION_DATA, differences, results
    from kit.tools.report.data_tables import text_table

    differing = [{key: text.replace("\n", "; ") for key, text in row.items()} for row in differences(runs)]
    lines = [*text_table(results(runs)), "", *(text_table(differing) if differing else ["  nothing differs"]), ""]
    if any(row[""] == EVALUATION_DATA for row in differing):
        lines += ["  the evaluation data differ: evaluation losses and exact matches are not comparable", ""]
    return lines


def _run_of(folder: Path) -> Path:
    """The folder of the run that ``folder`` lies in, such as that of ``final/`` or a checkpoint; else ``folder``."""
    above = [folder, *Path(os.path.realpath(folder)).parents[:2]]
    return next((each for each in above if (each / "run.json").is_file()), folder)


def _check_twice(folders: list[Path]) -> None:
    resolved = [os.path.realpath(folder) for folder in folders]  # of links in a circle too
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise UserError(Problem("RUN", f"{folders[i]} is given twice", "each run once"))


def _check_output(path: Path, is_ours: bool) -> None:
    """Refuse to overwrite a file that is not a page of the kit. ``is_ours``: the path is that of a run's own page."""
    from kit.tools.report.page import GENERATOR

    try:
        if path.is_dir() or (
            path.exists() and not is_ours and GENERATOR not in read_small(path, errors="replace")[:2000]
        ):
            raise UserError(Problem("--output", f"{path} exists, and is not a report", "a new file, or a report"))
    except OSError as error:
        raise UserError(Problem("--output", f"{path} cannot be read ({error.strerror})")) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 (name the runs before --watch)")
    return seconds
