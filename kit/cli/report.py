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
from kit.run.record import RUN_FILE, metrics_rows
from kit.visible import joined, one_line

if TYPE_CHECKING:
    from kit.tools.report.runs import ReportedRun

HELP = "write the report of a run as far as it has come, or compare several runs"
RUNS = Path("runs")  # where runs are unless --output_dir says otherwise
COMPARISON = Path("comparison.html")
SECONDS = 5.0  # between two writings


def run(argv: list[str]) -> int:
    """Write the page of one run into its folder, or that of several runs beside them; or either into ``--output``.

    Raises:
        UserError: a folder holds no run or no metrics, or the page cannot be written.
    """
    parser = Parser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    what = f"output_dir of a run, or a folder of runs to compare; default: {RUNS}"
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help=what)
    output = f"the page; default: report.html in the run's folder, of several runs {COMPARISON} beside them"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    watch = f"write it again every SECONDS seconds until the runs end; default: {SECONDS:g}"
    parser.add_argument("--watch", nargs="?", type=_seconds, const=SECONDS, default=0.0, metavar="SECONDS", help=watch)
    options = parser.parse_args(argv)
    if not options.runs and not RUNS.is_dir():
        expected = "the output_dir of a run, or a folder of runs"
        raise UserError(Problem("RUN", f"none is given, and there is no folder {RUNS} here", expected))
    options.runs = _runs_of(options.runs or [RUNS], needs_steps=not options.watch)
    path = options.output or _default_page(options.runs)
    _check_output(path)
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
    from kit.tools.report.comparison import best_runs, differences, results
    from kit.tools.report.data_tables import text_table

    differing = [{key: text.replace("\n", "; ") for key, text in row.items()} for row in differences(runs)]
    tables = [*text_table(results(runs)), "", *(text_table(differing) if differing else ["  nothing differs"])]
    return [*tables, "", one_line(best_runs(runs).text)]


def _runs_of(folders: list[Path], needs_steps: bool) -> list[Path]:
    """The runs to report: of a folder of runs, those that have begun; without pages of the kit, as ``runs/*`` has them.

    Raises:
        UserError: there is none, or one is given twice.
    """
    runs: list[Path] = []
    for folder in folders:
        if folder.is_file() and _is_page(folder):
            continue
        run = _run_of(folder)
        inside = [] if (run / RUN_FILE).is_file() else _runs_in(folder)
        # If none has begun, each is named as a problem.
        begun = [each for each in inside if not needs_steps or _has_begun(each)] or inside
        for each in sorted(set(inside) - set(begun)):
            show(f"left out, without a step yet: {one_line(str(each))}")
        runs += begun or [run]
    if not runs:
        raise UserError(Problem("RUN", "pages only", "the output_dir of a run, or a folder of runs"))
    resolved = [os.path.realpath(run) for run in runs]  # of links in a circle too
    twice = next((run for i, run in enumerate(runs) if resolved[i] in resolved[:i]), None)
    if twice:
        raise UserError(Problem("RUN", f"{twice} is given twice", "each run once"))
    return runs


def _run_of(folder: Path) -> Path:
    """The folder of the run that ``folder`` lies in, such as that of ``final/`` or a checkpoint; else ``folder``."""
    above = [folder, *Path(os.path.realpath(folder)).parents[:2]]
    return next((each for each in above if (each / RUN_FILE).is_file()), folder)


def _runs_in(folder: Path) -> list[Path]:
    """The runs directly in a folder, by name; one that a link names too is there once."""
    found = {os.path.realpath(each.parent): each.parent for each in sorted(folder.glob(f"*/{RUN_FILE}"), reverse=True)}
    return sorted(found.values())


def _has_begun(run: Path) -> bool:
    return next(iter(metrics_rows(run)), None) is not None


def _default_page(runs: list[Path]) -> Path:
    """Where the page of these runs belongs: into the folder of a single one, else beside them.

    Raises:
        UserError: several runs have only the root of the file system in common.
    """
    if len(runs) == 1:
        return runs[0] / "report.html"
    parents = {run.parent for run in runs}
    if len(parents) == 1:
        return parents.pop() / COMPARISON  # as the user wrote it
    above = Path(os.path.commonpath([run.absolute().parent for run in runs]))
    if above == Path(above.anchor):
        expected = f"--output with a file, such as --output {COMPARISON}"
        raise UserError(Problem("--output", f"is missing: the runs have no folder in common but {above}", expected))
    return Path(os.path.relpath(above)) / COMPARISON


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
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 (name the runs before --watch)")
    return seconds
