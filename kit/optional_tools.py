"""What a run shows by the tools, where they are installed. Only the script calls it, and nothing else needs a tool."""

from pathlib import Path

from kit.config.paths import PACKAGE
from kit.run.checked import Checked
from kit.system.console import say

HAS_TOOLS = (PACKAGE / "tools").is_dir()  # a run needs none of them


def show_dry_run(checked: Checked) -> None:
    """Print what a run would do, for ``--dry_run``. Raises ``UserError`` if the run in its folder cannot continue."""
    if HAS_TOOLS:
        from kit.tools.plan.dry_run import describe_run

        say(*describe_run(checked))
    else:
        say("Dry run: all checks passed. Without kit/tools there is nothing more to show.")


def write_report(folder: Path) -> None:
    """Write ``report.html`` of the run in ``folder``."""
    if HAS_TOOLS:
        from kit.tools.report.run_page import write_report_at_end

        write_report_at_end(folder)
