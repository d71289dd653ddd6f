"""``kit report``: make the report of a run anew, also of one that was killed or still goes on."""

import argparse
from pathlib import Path

from kit.console import show

HELP = "write report.html of a run as far as it has come: curves, evaluations, data"


def run(argv: list[str]) -> int:
    """Write the page. Raises ``UserError`` where there is no run."""
    parser = argparse.ArgumentParser(prog="kit report", description=HELP + ".", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="its output_dir")
    options = parser.parse_args(argv)
    from kit.report.run_page import write_report

    show(f"report: {write_report(options.run)}")
    return 0
