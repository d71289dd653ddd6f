"""``kit chat``: chat with the model of a run, or with any other."""

from kit.config.command_line import read_command_line
from kit.data.chat.messages import read_kwargs
from kit.data.media import KINDS
from kit.system.console import Parser, announce_wait, show
from kit.system.errors import Problem, UserError, raise_if

HELP = "chat with the model of a run, and with its base model for comparison"
USAGE = """usage: kit chat RUN [--image FILE] [--audio FILE] [--base] [--plain] [--temperature T] [--flag value ...]

Chat with the model of a run, and with its base model for comparison. RUN is the folder of a finished run, a checkpoint,
an adapter, or any model. The chat template and the stop tokens are those of the run; decoding is greedy by default.

  --image FILE       image before the first question of a conversation; repeat it for several
  --audio FILE       the same with audio
  --base             answer with the base model too, without the adapter
  --plain            no chat template: your text is the prompt, as for a run on plain text
  --temperature T    sampling temperature, from 0.01 (default: greedy)
  --top_p P          nucleus sampling: keep the most probable tokens with this total probability
  --tools FILE:F,G   functions that the model may call: results are shown, and given to it
  --environment FILE:CLASS   the same with the methods of an object for each conversation
  --row JSON         the row of which reset gets the columns, such as '{"level": 3}'

Takes the flags of recipes/finetune.py, such as --max_new_tokens (default here: 512), --system_prompt (default: the
run's), --seed, --chat_template and --method qlora (a base in 4 bits). If the base model was moved, replace RUN by
--adapter_name_or_path ADAPTER --model_name_or_path BASE. In the terminal, /new starts a new conversation, /exit or
Ctrl-D quits, Ctrl-C stops an answer. Without a terminal, each line of standard input is a conversation, and only the
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
    for flag in ("--image", "--audio"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--row", default="{}")
    own, words = parser.parse_known_args(argv)
    media = [(kind, file) for kind in KINDS for file in getattr(own, kind)]
    given = {word.partition("=")[0].replace("-", "_") for word in words}
    if argv[0].startswith("-") and not {"__model_name_or_path", "__adapter_name_or_path"} & given:
        raise UserError("RUN", "missing", "the folder of a run, or a model", "kit chat RUN")
    words += [] if "__max_new_tokens" in given else [f"--max_new_tokens={MAX_NEW_TOKENS}"]
    stands_for = {"model_name_or_path": "dataset"}  # no data are read
    request = read_command_line(words, stands_for, positional=("model_name_or_path",), trains=False)
    problems, recipe = request.problems, request.recipe
    if recipe:
        found = "not supported with --plain, which uses no chat template"
        needs = {"system_prompt": recipe.system_prompt, "tools": recipe.has_tools, **dict(media)}
        problems += [
            Problem(f"--{name}", found, fix="leave out --plain") for name in needs if own.plain and needs[name]
        ]
        if recipe.has_tools and media:
            problems.append(Problem("--tools", "not supported with --image or --audio", fix="leave these out"))
    try:
        row = read_kwargs("--row", own.row)
    except UserError as error:
        problems += error.problems
    raise_if(problems)
    assert recipe is not None
    announce_wait(f"opening {recipe.adapter_name_or_path or recipe.model_name_or_path}")
    from kit.tools import chat

    chat.talk(request, own.base, own.plain, media, row)
    return 0
