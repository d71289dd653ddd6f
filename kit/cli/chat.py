"""``kit chat``: talk to the model of a run, or to any other."""

from kit.config.command_line import read_command_line
from kit.system.console import Parser, announce_wait, show
from kit.system.errors import Problem, UserError, raise_if

HELP = "talk to the model of a run, and beside it to the base of an adapter"
USAGE = """usage: kit chat RUN [--image FILE] [--base] [--plain] [--temperature T] [--top_p P] [--flag value ...]

Talk to the model of a run, and beside it to the base of an adapter. RUN is the folder of a finished run, one of its
checkpoints, an adapter, or any model. Prompts are rendered, and answers end, as in the evaluation of the run; by
default answers are greedy too.

  --image FILE       a picture before the first question of a conversation; several are several
  --base             answer with the base as well: the model without the adapter
  --plain            no chat template: what you type is the prompt, as for a run on plain text
  --temperature T    draw from probabilities of this temperature, from 0.01 (default: greedy)
  --top_p P          with a temperature: draw from the likeliest tokens that together have this probability

Takes the flags of recipes/finetune.py, such as --max_new_tokens (default here: 512), --system_prompt (default: that of
the run), --seed, --chat_template and --method qlora (a base in 4 bits). In place of RUN, --adapter_name_or_path ADAPTER
--model_name_or_path BASE where the base is no longer at its path. In the terminal /new begins a new conversation, /exit
or Ctrl-D ends, Ctrl-C ends an answer. Without a terminal each line of standard input is a conversation, and only the
answers are printed.
Exit status: 0, or 2 if you can fix something."""
MAX_NEW_TOKENS = 512


def run(argv: list[str]) -> int:
    """Open the model, talk until the input ends, and return 0. Raises ``UserError`` if something is wrong."""
    if not argv:
        show(USAGE)
        return 2
    parser = Parser(prog="kit chat", add_help=False, allow_abbrev=False)
    for switch in ("--base", "--plain"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--image", action="append", default=[])
    own, words = parser.parse_known_args(argv)
    given = {word.partition("=")[0].replace("-", "_") for word in words}
    if argv[0].startswith("-") and not {"__model_name_or_path", "__adapter_name_or_path"} & given:
        raise UserError("RUN", "missing", "the folder of a run, or a model", "kit chat RUN")
    words += [] if "__max_new_tokens" in given else [f"--max_new_tokens={MAX_NEW_TOKENS}"]
    stands_for = {"model_name_or_path": "dataset"}  # no data are read
    request = read_command_line(words, stands_for, positional=("model_name_or_path",), trains=False)
    problems, recipe = request.problems, request.recipe
    if recipe and recipe.system_prompt and own.plain:
        found = "with --plain: no messages are rendered"
        problems.append(Problem("--system_prompt", found, fix="leave out one of the two"))
    if own.image and own.plain:
        problems.append(
            Problem("--image", "with --plain: only a chat template says where it stands", fix="leave out --plain")
        )
    raise_if(problems)
    assert recipe is not None
    announce_wait(f"opening {recipe.adapter_name_or_path or recipe.model_name_or_path}")
    from kit.tools import chat

    chat.talk(request, own.base, own.plain, own.image)
    return 0
