"""Reads a command line of another kit out of a shell script: its program, flags and number of processes.

Promises: nothing is executed. ``$NAME`` is filled in where the script sets it, and a simple ``$(expr A / B)`` is
computed; anything else stays as it is, and the value is then refused.
"""

import ast
import operator
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kit.errors import Problem, UserError

# Programs that train, as patterns of the words before the flags, with the kit.
_PROGRAMS = (
    (r"(swift|megatron) (sft|pt)$", "ms-swift"),
    (r"(swift|megatron) rlhf$", "ms-swift"),
    (r"swift/cli/(_megatron/)?(sft|pt|rlhf)\.py$", "ms-swift"),
    (r"trl (sft)$|(?:^|[/ ])sft\.py$", "TRL"),
    (r"trl (dpo|kto)$|(?:^|[/ ])(dpo|kto|orpo|cpo)\.py$", "TRL"),
    (r"llamafactory-cli train$|src/train\.py$", "LLaMA-Factory"),
)
_TRAINS = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _PROGRAMS))
_OF_LAUNCHERS = ("nproc_per_node", "num_processes", "num_gpus")
_COMMENT = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|(?<!\S)#.*", re.DOTALL)  # or what quotes a #
_IS_FILE = re.compile(r"^[^-].*\.(ya?ml|json)$")
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_SUMS[ast.FloorDiv] = operator.floordiv


@dataclass(frozen=True)
class Command:
    """A command that trains."""

    kit: str
    program: str  # ``trl sft``: the words before its flags
    flags: dict[str, Any]
    lines: dict[str, int]  # of each flag
    num_processes: int | None


def read_command(text: str, name: str) -> Command:
    """Read the first command that trains.

    Args:
        name: of the file, for messages.

    Raises:
        UserError: there is none, or it names a file with the settings.
    """
    variables: dict[str, str] = {}
    for number, line in _joined(text):
        try:
            words = shlex.split(_filled_in(_without_comment(line), variables))
        except ValueError:
            continue
        while words and re.fullmatch(r"(export|[A-Za-z_]\w*=.*)", words[0], re.DOTALL):
            key, _, value = words.pop(0).partition("=")
            variables[key] = value
        if command := _command(words, variables, number):
            _raise_if_in_a_file(command, name, number)
            return command
    known = "trl sft, swift sft, llamafactory-cli train"
    raise UserError(Problem(name, "no command that trains", f"one such as {known}"))


def _raise_if_in_a_file(command: Command, name: str, number: int) -> None:
    """Raise ``UserError`` if the settings stand in a file that the command names."""
    file = str(command.flags.get("config", ""))
    if not _IS_FILE.search(file):
        return
    if "$" in file:  # the folder of the script, in most
        file = str(Path(name).with_name(Path(file).name))
    count = f" --num_processes {command.num_processes}" if command.num_processes else ""
    others = ", beside those in other flags" if len(command.flags) > 1 else ""
    found = f"a command whose settings stand in {file}{others}"
    raise UserError(Problem(f"{name}:{number}", found, "that file", f"kit convert {shlex.quote(file)}{count}"))


def _joined(text: str) -> list[tuple[int, str]]:
    """The lines with their numbers, those that end with a backslash joined with the next."""
    lines: list[tuple[int, str]] = []
    open_line = False
    for number, line in enumerate(text.splitlines(), 1):
        if open_line and not line.lstrip().startswith("#"):
            start, before = lines.pop()
            lines.append((start, before + " " + line.rstrip("\\ ")))
        elif not open_line:
            lines.append((number, line.rstrip("\\ ")))
        open_line = line.rstrip().endswith("\\")
    return lines


def _without_comment(line: str) -> str:
    """A line up to its comment. As in a shell, ``#`` begins one only where a word begins: ``id#500`` is a word."""
    return _COMMENT.sub(lambda found: "" if found[0].startswith("#") else found[0], line)


def _filled_in(line: str, variables: dict[str, str]) -> str:
    line = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), line)
    return re.sub(r"\$\(expr ([\d +*/-]+)\)|\$\(\(([\d +*/()-]+)\)\)", _computed, line)


def _computed(found: re.Match[str]) -> str:
    try:
        return str(_value(ast.parse((found[1] or found[2]).strip(), mode="eval").body))
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return found[0]


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        result: int = _SUMS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise TypeError


def _command(words: list[str], variables: dict[str, str], number: int) -> Command | None:
    """The command of these words, if it trains."""
    program: list[str] = []
    before: dict[str, str] = {}  # flags of a launcher
    rest = list(words)
    while rest and not _TRAINS.search(" ".join(program)):
        word = rest.pop(0)
        if word.startswith("-"):
            key, has_value, value = word.lstrip("-").partition("=")
            before[key.replace("-", "_")] = value if has_value else (rest[0] if rest else "")
        program.append(word)
    shown = " ".join(program)
    kit = next((kit for pattern, kit in _PROGRAMS if re.search(pattern, shown)), None)
    if kit is None:
        return None
    counts = [before[key] for key in _OF_LAUNCHERS if before.get(key, "").isdigit()]
    counts += [variables[key] for key in ("NPROC_PER_NODE",) if variables.get(key, "").isdigit()]
    nodes = int(variables.get("NNODES", "1")) if variables.get("NNODES", "1").isdigit() else 1
    per_node = int(counts[0]) if counts else None
    flags = _flags(rest)
    if rest and _IS_FILE.search(rest[0]):  # ms-swift and LLaMA-Factory take it without --config
        flags |= {"config": rest[0]} | {word: word for word in rest[1:] if "=" in word}
    return Command(kit, shown, flags, dict.fromkeys(flags, number), per_node * nodes if per_node else None)


def _flags(words: list[str]) -> dict[str, Any]:
    """Flags with their values as YAML reads them; several words are a list, none is true."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if has_value else []
        elif name:
            flags[name].append(word)
    return {name: _typed(values) for name, values in flags.items()}


def _typed(values: list[str]) -> Any:
    parsed = [_value_of(value, is_single=len(values) == 1) for value in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def _value_of(value: str, is_single: bool) -> Any:
    """A number, a switch, null, or a list or mapping in brackets as YAML reads it; any other word as it is."""
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(parsed, list | dict):
        return parsed if is_single and value[:1] in ("{", "[") else value
    return parsed if isinstance(parsed, int | float | None) else value
