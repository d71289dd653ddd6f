"""``kit prepare``: tokenise the data before a run, on a machine without a GPU."""

from kit import interrupt
from kit.config.command_line import read_recipe
from kit.console import announce_wait, show
from kit.errors import Problem, UserError
from kit.inputs import check_inputs
from kit.visible import joined

HELP = "tokenise the data of a run ahead of it, on a machine without a GPU"


def run(argv: list[str]) -> int:
    """Tokenise the data into the cache, where the run finds it. Raises ``UserError`` with all problems."""
    if {"-h", "--help"} & set(argv):
        show("usage: kit prepare [--recipe R] [--flag value ...]\n\n" + HELP + ".")
        show("Takes the flags of recipes/finetune.py. With the same ones, and the same $KIT_CACHE, a run finds it all.")
        return 0
    recipe = read_recipe(argv)
    announce_wait(f"opening the tokenizer and config of {recipe.model_name_or_path}, and the data")
    check_inputs(recipe)
    from kit import preflight
    from kit.cache import cache_folder
    from kit.data.feed.ranks import Ranks

    interrupt.raise_on_ctrl_c()
    checked = preflight.check(recipe)
    data = checked.data
    if recipe.streaming:
        raise UserError(Problem("streaming", "nothing to prepare: a stream is read while training"))
    feed = data.open_feed(recipe, Ranks(), 0, {})
    lines = [f"{data.total_steps(recipe)} steps", f"all of it is in the cache: {cache_folder()}"]
    show(joined([*checked.notes, *feed.notes(), *lines]))
    return 0
