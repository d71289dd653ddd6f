"""``kit report``: write the report of a run, or a comparison of several, also while they train."""

import os
from pathlib import Path

from kit.run.record import RUN_FILE
from kit.system.console import Parser, show
from kit.system.durable import read_small
from kit.system.errors import Problems, UserError
from kit.system.visible import joined, one_line

HELP = "write the HTML report of a run, finished or not, or compare several runs"
RUNS = Path("runs")  # where runs are unless --output_dir says otherwise
COMPARISON = "comparison.html"


def run(argv: list[str]) -> int:
    """Write the page of one run into its folder, or that of several runs next to them; or either to ``--output``.

    Raises:
        UserError: a folder holds no run or no metrics, or the page cannot be written.
    """
    parser = Parser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    what = f"output_dir of a run, or a folder of runs to compare; default: {RUNS}/"
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help=what)
    output = (
        f"file to write; default: report.html in the run's folder, or {COMPARISON} next to the first of several runs"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    options = parser.parse_args(argv)
    folders = _runs_of(options.runs or [RUNS])
    path = options.output or (folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / COMPARISON)
    _check_output(path)
    from kit.tools.report.page import write_page
    from kit.tools.report.run_page import differences, report_page, results
    from kit.tools.report.runs import read_reported_run
    from kit.tools.text_table import text_table

    problems, runs = Problems(), []
    for folder in folders:
        with problems.caught():
            runs.append(read_reported_run(folder))
    problems.raise_if_any()
    write_page(path, report_page(runs))
    if len(runs) > 1:
        for rows in (results(runs), differences(runs)):
            show(joined([*(text_table(rows) or ["nothing differs"]), ""]))
    show(f"report: {one_line(str(path))}")
    return 0


def _runs_of(folders: list[Path]) -> list[Path]:
    """The runs to report, each once: of a folder of runs, all of them; without pages, as ``runs/*`` has them."""
    runs: dict[str, Path] = {}
    for folder in [each for each in folders if each.suffix != ".html"] or folders:
        around = [folder, *Path(os.path.realpath(folder)).parents[:2]]  # of final/ or a checkpoint
        run = next((each for each in around if (each / RUN_FILE).is_file()), None)
        inside = [] if run else sorted(file.parent for file in folder.glob(f"*/{RUN_FILE}"))
        for each in inside or [run or folder]:
            runs.setdefault(os.path.realpath(each), each)
    return list(runs.values())


def _check_output(path: Path) -> None:
    """Refuse to overwrite a file that is not a page of the kit."""
    from kit.tools.report.page import GENERATOR

    try:
        if path.is_dir() or (path.exists() and GENERATOR not in read_small(path, errors="replace")[:2000]):
            raise UserError("--output", f"{path} exists, and is not a report", "a new file, or a report")
    except OSError as error:
        raise UserError("--output", f"{path} cannot be read ({error.strerror})") from None
