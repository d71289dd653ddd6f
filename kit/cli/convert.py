"""``kit convert``: make a recipe of the configuration file of another kit."""

import shlex
from collections import Counter
from itertools import count
from pathlib import Path

from kit.config.command_line import read_flags
from kit.config.recipe import Recipe
from kit.config.scripts import command_of
from kit.console import Parser, show
from kit.errors import Problem, UserError, did_you_mean, raise_if
from kit.tools.convert.convert import Converted, convert
from kit.tools.convert.data import BARE
from kit.tools.convert.draft import Group, shown
from kit.visible import one_line

HELP = "make a recipe of a file of axolotl, LLaMA-Factory, TRL, ms-swift and others"


def run(argv: list[str]) -> int:
    """Convert a file and print the recipe, or write it and print what became of the keys. Raises ``UserError``."""
    parser = Parser(prog="kit convert", description=HELP, epilog="Any flag of a recipe wins: --max_length 4096")
    parser.add_argument("file", help="a YAML or JSON file of that kit, or a shell script with its command", type=Path)
    parser.add_argument("--out", help="write the recipe to this file, which must not exist", type=Path)
    parser.add_argument("--num_processes", help="processes of the run there; the global batch depends on it", type=int)
    parser.add_argument("--drop", help="keys, separated by commas, to leave out although that changes what is learned")
    given, rest = parser.parse_known_args(argv)
    flags, problems, _ = read_flags(rest)
    problems += [
        Problem(f"--{name}", "unknown flag", fix=did_you_mean(name, Recipe.model_fields))
        for name in flags
        if name not in Recipe.model_fields
    ]
    if given.num_processes is not None and given.num_processes < 1:
        problems.append(Problem("--num_processes", f"found {given.num_processes}", "whole number from 1"))
    if given.out is not None and given.out.exists():
        problems.append(Problem("--out", f"{given.out} exists", "a new file", f"--out {_free_name(given.out)}"))
    raise_if(problems)
    drop = [key.strip() for key in (given.drop or "").split(",") if key.strip()]
    converted = convert(given.file, given.num_processes, drop, flags)
    _check_drop(converted, drop)
    template = _template_file(converted, given.out)
    if template is not None:
        is_bare = converted.draft.template == BARE
        note = "without tags: the whole text stands in prompt_format" if is_bare else f"that of {given.file.name}"
        converted.draft.put("chat_template", template.name, note)
    recipe = given.out or Path("RECIPE.yaml")
    command = f"{command_of('finetune.py')} --config {converted.config} --recipe {shlex.quote(str(recipe))}"
    if converted.config != "single":  # by itself it would take all GPUs, which the global batch was not made for
        command += f" --num_processes {converted.draft.num_processes}"
    text = converted.text(
        [f"Made by kit convert of {given.file.name}, a file of {converted.kit}.", f"Launch: {command}"]
    )
    if given.out is None:
        show(text.rstrip("\n"))
        return 0
    try:
        if template is not None:
            template.write_text(converted.draft.template, encoding="utf-8")
        given.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(Problem("--out", f"{given.out}: {error.strerror}", "a file that can be written")) from None
    show("\n".join(_report(converted, given.out, command)))
    return 0


def _free_name(out: Path) -> Path:
    """A name like ``out`` that no file has."""
    if out.is_dir():
        out = out / "my.yaml"
        if not out.exists():
            return out
    names = (out.with_name(f"{out.stem}-{number}{out.suffix}") for number in count(2))
    return next(name for name in names if not name.exists() and not name.with_suffix(".jinja").exists())


def _check_drop(converted: Converted, drop: list[str]) -> None:
    """Refuse a key of ``--drop`` that the file does not have, or that needs no word."""
    keys = {each.key for each in converted.draft.left_out if each.group is Group.LEARNS}
    raise_if(
        Problem("--drop", f"{key} was not in the way", ", ".join(sorted(keys)) or "none", did_you_mean(key, keys))
        for key in drop
        if key not in keys
    )


def _template_file(converted: Converted, out: Path | None) -> Path | None:
    """The file for the chat template that the recipe needs; None if it needs none, or names another one."""
    if not converted.draft.template or "chat_template" in converted.draft.typed:
        return None
    if out is None:
        raise UserError(Problem("--out", "missing", "a file: the chat template is written beside it", "--out my.yaml"))
    path = out.with_suffix(".jinja")
    if path.exists():
        raise UserError(
            Problem("--out", f"{path} exists", "a new file for the chat template", f"--out {_free_name(out)}")
        )
    return path


def _report(converted: Converted, out: Path, command: str) -> list[str]:
    """What became of the keys, and the command that trains."""
    draft = converted.draft
    lines = [f"wrote {out}: {len(draft.values)} settings, from a file of {converted.kit}"]
    for group in Group:
        left_out = [each for each in draft.left_out if each.group is group]
        reasons = Counter(each.reason for each in left_out)
        if left_out:
            lines.append(f"left out, {group.value}:")
        for reason in reasons:
            same = [each for each in left_out if each.reason == reason]
            keys = ", ".join(f"{each.key}: {shown(each.value)}" for each in same[:3])
            more = f" and {len(same) - 3} more" if len(same) > 3 else ""
            lines.append(f"  {one_line(keys)}{more}  ({reason})")
    if draft.num_processes == 1 and converted.config.startswith("fsdp"):
        lines.append(
            "the weights were sharded: give --num_processes N, since the global batch depends on it; now it is 1"
        )
    elif draft.num_processes == 1:
        lines.append("one process: give --num_processes N if it ran on more, since the global batch depends on it")
    return [*lines, "", command]
