"""``kit chat``: talk to the model of a run, or to any other."""

from kit.cli.model_words import split_words
from kit.config.command_line import read_command_line
from kit.console import announce_wait, show
from kit.errors import Problem, raise_if

HELP = "talk to the model of a run, and beside it to its base"
USAGE = """usage: kit chat RUN [--base] [--plain] [--temperature T] [--top_p P] [--flag value ...]

Talk to the model of a run, and beside it to its base, in the terminal. RUN is the folder of a run, its final/, one of
its checkpoints, an adapter, or any model. Prompts are rendered, and answers end, as in the evaluation of the run; by
default answers are greedy too.

  --base             answer with the base as well: the model without the adapter, or what the run began with
  --plain            no chat template: what you type is the prompt, for a model trained on prompts as plain text
  --temperature T    draw from probabilities of this temperature, from 0.01 (default: greedy)
  --top_p P          with a temperature: draw from the likeliest tokens that together have this probability

Takes the flags of recipes/finetune.py, such as --max_new_tokens (default here: 512), --system_prompt (default: that of
the run), --seed, --chat_template, --method qlora (a base in 4 bits) and --model_name_or_path (the base of an adapter,
where it is no longer at its path). In the terminal /new begins a new conversation, /exit or Ctrl-D ends, Ctrl-C ends
an answer. Without a terminal each line of standard input is a conversation, and only the answers are printed.
Exit status: 0, or 2 if you can fix something."""
MAX_NEW_TOKENS = 512
_SWITCHES = ("base", "plain")


def run(argv: list[str]) -> int:
    """Open the model, talk until the input ends, and return 0. Raises ``UserError`` if something is wrong."""
    if {"-h", "--help"} & set(argv) or not argv:
        show(USAGE)
        return 0 if argv else 2
    with_base, is_plain, words = _own_flags(argv)
    request = read_command_line(words, {"model_name_or_path": "dataset"}, trains=False)  # no data are read
    raise_if(request.problems)
    assert request.recipe is not None
    recipe = request.recipe
    announce_wait(f"opening {recipe.adapter_name_or_path or recipe.model_name_or_path}")
    from kit.tools import chat

    chat.talk(request, with_base, is_plain)
    return 0


def _own_flags(argv: list[str]) -> tuple[bool, bool, list[str]]:
    """Take ``--base`` and ``--plain`` out of ``argv``. Returns whether they are there, and the words for the recipe."""
    own, flags, problems = split_words(argv, "kit chat", _SWITCHES)
    if flags.pop("num_return_sequences", "1") != "1":
        problems.append(Problem("--num_return_sequences", "in a conversation", "one answer", "leave it out"))
    with_base, is_plain = (own.get(name) == "true" for name in _SWITCHES)
    if "system_prompt" in flags and is_plain:
        problems.append(
            Problem("--system_prompt", "with --plain: no messages are rendered", fix="leave out one of the two")
        )
    raise_if(problems)
    flags.setdefault("max_new_tokens", str(MAX_NEW_TOKENS))
    return with_base, is_plain, [f"--{name}={value}" for name, value in flags.items()]
