"""Reads a command line of another kit out of a shell script. Nothing is executed, and no variable is filled in."""

import re
import shlex
from itertools import takewhile
from typing import Any, NamedTuple

import yaml

from kit.errors import Problem, UserError

# The programs that train, with their kit; the last word names the objective.
_PROGRAMS = {
    r"\bswift (sft|pt|rlhf)\s": "ms-swift",
    r"\btrl (sft|dpo|kto)\s": "TRL",
    r"\b(sft|dpo|kto|orpo|cpo)\.py\s": "TRL",
    r"\bllamafactory-cli (train)\s": "LLaMA-Factory",
}
_PROCESSES = re.compile(r"(?:NPROC_PER_NODE=|--(?:nproc_per_node|num_processes|num_gpus)[= ])(\d+)")
_NODES = re.compile(r"(?i)nnodes|num_machines")  # then the number of all processes has to be typed


class Command(NamedTuple):
    """A command that trains."""

    kit: str
    program: str  # ``dpo`` of ``trl dpo``
    flags: dict[str, Any]
    num_processes: int | None


def read_command(text: str, name: str) -> Command:
    """Read the first command that trains. Several words after a flag are a list, none is true.

    Args:
        name: of the file, for messages.

    Raises:
        UserError: there is none, or it names a file with the settings.
    """
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\s*\n", " ", text).splitlines()
    found = ((line, re.search(program, line), kit) for program, kit in _PROGRAMS.items() for line in lines)
    line, program, kit = next((each for each in found if each[1]), ("", None, ""))
    if program is None:
        expected = "one such as trl sft, swift sft or llamafactory-cli train"
        raise UserError(Problem(name, "no command that trains", expected))
    flags: dict[str, list[str]] = {}
    try:
        words = shlex.split(line[program.end() :])
    except ValueError as error:
        raise UserError(Problem(name, str(error), "a command of a shell")) from None
    flag = "config"  # a file without a flag
    for word in takewhile(lambda word: not re.match(r"\d?[|&;>]", word), words):
        if word.startswith("--"):
            flag, has_value, value = word[2:].partition("=")
            flag = flag.replace("-", "_")
            flags[flag] = [value] if has_value else []
        else:
            flags.setdefault(flag, []).append(word)
    if "config" in flags:
        file = " ".join(flags["config"])
        raise UserError(Problem(name, f"the settings of its command stand in {file}", "that file"))
    before = "\n".join(lines).partition(line)[0] + line[: program.start()]
    counts = [] if _NODES.search(before) else _PROCESSES.findall(before)
    values = {key: _value(words) for key, words in flags.items()}
    return Command(kit, program[1], values, int(counts[-1]) if counts else None)


def _value(words: list[str]) -> Any:
    """A number, a switch, or a list or mapping in brackets as YAML reads it; any other word as it is."""
    form = re.compile(r"[\[{].*[\]}]|[-+.e\d]+|[Tt]rue|[Ff]alse")
    values = [yaml.safe_load(word) if form.fullmatch(word) else word for word in words]
    return True if not values else values[0] if len(values) == 1 else values
