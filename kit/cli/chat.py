"""``kit chat``: talk to the model of a run, or to any other."""

import os
from dataclasses import dataclass
from pathlib import Path

from kit.config.command_line import read_command_line, read_flags
from kit.console import announce_wait, show
from kit.errors import Problem, UserError, raise_if

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
_WITHOUT_VALUE = ("base", "plain")


@dataclass(frozen=True)
class Asked:
    """The flags of this command alone."""

    with_base: bool
    plain: bool


def run(argv: list[str]) -> int:
    """Open the model, talk until the input ends, and return 0. Raises ``UserError`` if something is wrong."""
    if {"-h", "--help"} & set(argv) or not argv:
        show(USAGE)
        return 0 if argv else 2
    asked, words = _own_flags(argv)
    request = read_command_line(words, {"model_name_or_path": "dataset"}, trains=False)  # no data are read
    raise_if(request.problems)
    assert request.recipe is not None
    recipe = request.recipe
    announce_wait(f"opening {recipe.adapter_name_or_path or recipe.model_name_or_path}")
    from kit.tools import chat

    chat.talk(request, asked)
    return 0


def _own_flags(argv: list[str]) -> tuple[Asked, list[str]]:
    """Take this command's own flags out of ``argv``. Returns them, and the words for the recipe."""
    positional = [] if argv[0].startswith("--") else [argv[0]]
    words = [word if word.lstrip("-") not in _WITHOUT_VALUE else f"{word}=true" for word in argv[len(positional) :]]
    flags, problems, _ = read_flags(words, () if positional else ("model_name_or_path",))
    own = {name: flags.pop(name, None) for name in _WITHOUT_VALUE}
    if flags.pop("num_return_sequences", "1") != "1":
        problems.append(Problem("--num_return_sequences", "in a conversation", "one answer", "leave it out"))
    for name in _WITHOUT_VALUE:
        if own[name] not in (None, "true", "false"):
            problems.append(Problem(f"--{name}", f"found {own[name]!r}", "no value"))
    if "system_prompt" in flags and own["plain"] == "true":
        problems.append(
            Problem("--system_prompt", "with --plain: no messages are rendered", fix="leave out one of the two")
        )
    source = positional[0] if positional else None
    if source is not None and "model_name_or_path" in flags:
        flags.setdefault("adapter_name_or_path", opened(source))
    elif source is not None:
        flags["model_name_or_path"] = opened(source)
    elif not {"model_name_or_path", "adapter_name_or_path"} & set(flags):
        problems.append(Problem("RUN", "missing", "the folder of a run, or a model", "kit chat RUN"))
    raise_if(problems)
    asked = Asked(
        with_base=own["base"] == "true",
        plain=own["plain"] == "true",
    )
    flags.setdefault("max_new_tokens", str(MAX_NEW_TOKENS))
    return asked, [f"--{name}={value}" for name, value in flags.items()]


def opened(source: str) -> str:
    """Return what to open for ``source``: of the folder of a run its ``final/``, or its newest checkpoint.

    Raises ``UserError`` if the folder of a run has neither.
    """
    from kit.checkpoint.manifest import list_checkpoints
    from kit.run.record import RUN_FILE

    folder = Path(os.path.expanduser(source))
    if not os.path.isfile(folder / RUN_FILE):
        return source
    if (folder / "final").is_dir():
        return str(folder / "final")
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise UserError(Problem("RUN", f"{source} has no final/ yet, and no checkpoint", "a run that has saved"))
    return str(checkpoints[-1])
