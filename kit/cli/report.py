"""``kit report``: write the report of a run again, also of a run that was killed or is still running."""

import argparse
from pathlib import Path

from kit.console import show

HELP = "write report.html of a run as far as it has come: curves, evaluations, data"


def run(argv: list[str]) -> int:
    """Write ``report.html`` of a run. Raises ``UserError`` if the folder holds no run."""
    parser = argparse.ArgumentParser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="its output_dir")
    options = parser.parse_args(argv)
    from kit.report.run_page import write_report

    show(f"report: {write_report(options.run)}")
    return 0
