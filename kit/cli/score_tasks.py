"""``kit score RUN --tasks NAMES``: score a model on tasks of lm-evaluation-harness."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kit.cli.model_words import split_words
from kit.config.command_line import read_command_line
from kit.console import announce_wait, show
from kit.errors import Problem, raise_if

USAGE = """usage: kit score RUN --tasks NAME,NAME [--base] [--plain] [--include_path FOLDER] [--flag value ...]

Score a model on tasks of lm-evaluation-harness: pip install "accelerate-recipes[eval]". RUN is the folder of a run, its
final/, one of its checkpoints, an adapter, or any model. Scores of what lies in a run's folder are kept there, in
tasks.jsonl, and its report shows them.

  --tasks NAMES                names of tasks, groups and tags, with * for any characters, or YAML files of tasks;
                               `lm-eval ls tasks` lists them
  --include_path FOLDER        YAML files of more tasks; functions that they name are run
  --base                       score the base too: the model without the adapter, or what the run began with
  --plain                      no chat template; default: that of the model, if it has one, and its system prompt
  --num_fewshot N              examples before each question; default: as the task says
  --limit N                    only the first N samples of each task; below 1 a share of them
  --confirm_run_unsafe_code    allow tasks that run code which the model writes, on this machine

Takes the flags of recipes/finetune.py, such as --per_device_eval_batch_size (default here: 8), --max_new_tokens
(default: as the task says), --system_prompt, --chat_template, --method qlora (a base in 4 bits) and
--model_name_or_path (the base of an adapter, where it is no longer at its path). The seeds are those of lm-eval. One
process, one GPU.
Exit status: 0, or 2 if you can fix something."""
BATCH_SIZE = 8
INSTALL = 'pip install "accelerate-recipes[eval]"'
_SWITCHES = ("base", "plain", "confirm_run_unsafe_code")
_VALUES = ("tasks", "include_path", "num_fewshot", "limit", "per_device_eval_batch_size")
_OF_DATA = ("eval_dataset", "eval_dataset_split", "dataset", "predict_with_generate", "metrics", "max_eval_samples")


@dataclass(frozen=True)
class Asked:
    """The flags of this command alone."""

    tasks: list[str]
    include_path: str | None
    with_base: bool
    plain: bool
    num_fewshot: int | None  # None: as each task says
    limit: float | None  # of samples of each task; below 1 a share of them; None: all
    batch_size: int
    max_new_tokens: int | None  # None: as each task says
    runs_unsafe_code: bool


def is_asked(argv: list[str]) -> bool:
    """Whether the words after ``kit score`` are for this command."""
    return any(word.partition("=")[0] == "--tasks" for word in argv)


def run(argv: list[str]) -> int:
    """Score the model, and return 0. Raises ``UserError`` if something is wrong."""
    if {"-h", "--help"} & set(argv):
        show(USAGE)
        return 0
    asked, words = _own_flags(argv)
    request = read_command_line(words, {"model_name_or_path": "dataset"}, trains=False)  # no data are read
    raise_if(request.problems)
    assert request.recipe is not None
    announce_wait(f"opening {request.recipe.adapter_name_or_path or request.recipe.model_name_or_path}")
    from kit.tools import tasks

    tasks.score(request, asked)
    return 0


def _own_flags(argv: list[str]) -> tuple[Asked, list[str]]:
    """Take this command's own flags out of ``argv``. Returns them, and the words for the recipe."""
    own, flags, problems = split_words(argv, "kit score", _SWITCHES, _VALUES)
    names = [name.strip() for name in own.get("tasks", "").split(",") if name.strip()]
    if not names:
        expected = "names of tasks, such as arc_easy,hellaswag; `lm-eval ls tasks` lists them"
        problems.append(Problem("--tasks", "no name", expected))
    for name in _OF_DATA:
        if name in flags:
            fix = "leave out one of the two"
            problems.append(Problem(f"--{name}", "with --tasks: a task brings its data and metrics", fix=fix))
    folder = own.get("include_path")
    if folder is not None and not os.path.isdir(folder):
        found, fix = f"no folder {folder!r}", ""
        if os.path.isfile(folder):
            found, fix = f"{folder!r} is a file", f"--include_path {Path(folder).parent}; or --tasks {folder}"
        problems.append(Problem("--include_path", found, "a folder of YAML files", fix))
    numbers: dict[str, float | None] = {}
    for name, least, expected in (
        ("num_fewshot", 0.0, "a whole number from 0"),
        ("limit", 0.0, "a number of samples, or a share of them between 0 and 1"),
        ("per_device_eval_batch_size", 1.0, "a whole number from 1"),
    ):
        numbers[name] = _number(own.get(name), name, least, expected, problems)
    if find_spec("lm_eval") is None:
        problems.append(Problem("--tasks", "needs lm-evaluation-harness, which is not installed", fix=INSTALL))
    raise_if(problems)
    num_fewshot, batch_size = numbers["num_fewshot"], numbers["per_device_eval_batch_size"]
    longest = flags.get("max_new_tokens", "")
    asked = Asked(
        tasks=names,
        include_path=folder,
        with_base=own.get("base") == "true",
        plain=own.get("plain") == "true",
        num_fewshot=None if num_fewshot is None else int(num_fewshot),
        limit=numbers["limit"],
        batch_size=BATCH_SIZE if batch_size is None else int(batch_size),
        max_new_tokens=int(longest) if longest.isdecimal() else None,  # the recipe refuses other values
        runs_unsafe_code=own.get("confirm_run_unsafe_code") == "true",
    )
    return asked, [f"--{name}={value}" for name, value in flags.items()]


def _number(text: str | None, name: str, least: float, expected: str, problems: list[Problem]) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
        is_fitting = number >= least and (number.is_integer() or (name == "limit" and number < 1))
        if is_fitting and (name != "limit" or number > 0):
            return number
    except (ValueError, OverflowError):
        pass
    problems.append(Problem(f"--{name}", f"found {text!r}", expected))
    return None
