"""``kit inspect``: show the samples that a run with these flags would train on."""

import sys
from pathlib import Path

from kit.config.command_line import read_recipe
from kit.preflight.inputs import check_inputs
from kit.preflight.packages import leave_out_packages
from kit.system import interrupt
from kit.system.console import Parser, announce_wait, show
from kit.system.errors import UserError
from kit.system.visible import one_line

HELP = "show tokenised samples with their loss masks"


def run(argv: list[str]) -> int:
    """Print samples and checks, and with ``--html`` write a page. Raises ``UserError`` with all problems."""
    parser = Parser(
        prog="kit inspect",
        description=HELP + ".",
        epilog="Takes the flags of recipes/finetune.py too: --recipe, --dataset, --chat_template, ... Without colours, "
        "supervised tokens stand in [[double brackets]].",
        allow_abbrev=False,
    )
    shown = "number of samples to show, spread over the data (default: 5); skipped rows come after them"
    parser.add_argument("-n", type=int, default=5, metavar="N", help=shown)
    parser.add_argument("--html", metavar="FILE", help="also write a self-contained HTML page")
    options, rest = parser.parse_known_args(argv)
    if options.n < 0:
        raise UserError("-n", f"found {options.n}", "whole number from 0")
    recipe = read_recipe(rest)
    announce_wait(f"opening the tokenizer and config of {recipe.model_name_or_path}, and the data")
    check_inputs(recipe)
    leave_out_packages(recipe)
    from kit.data.stream.stream import Stream
    from kit.preflight import preflight
    from kit.tools.report import samples_page
    from kit.tools.report.page import write_page

    interrupt.raise_on_ctrl_c()
    checked = preflight.check(recipe)
    if isinstance(checked.data, Stream):
        fix = "leave out --streaming; or give some of the files only"
        raise UserError("streaming", "samples of a stream cannot be shown", fix=fix)
    gathered = samples_page.gather_samples(recipe, checked.tokenizer, checked.data, checked.notes, options.n)
    colour = sys.stdout.isatty()
    show(samples_page.as_text(gathered, colour), has_colours=colour)
    if options.html:
        path = write_page(Path(options.html), samples_page.as_page(gathered))
        show(f"\npage: {one_line(str(path))}")
    return 0
