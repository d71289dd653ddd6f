"""``kit convert``: convert the config file of another kit to a recipe."""

import shlex
from pathlib import Path

from kit.config.command_line import read_flags
from kit.config.commands import command_of
from kit.config.recipe import Recipe
from kit.system.console import Parser, show
from kit.system.errors import Problem, UserError, did_you_mean, raise_if
from kit.tools.convert.convert import convert
from kit.tools.convert.write import recipe_text

HELP = "convert an axolotl, LLaMA-Factory, TRL, alignment-handbook or ms-swift config to a recipe"


def run(argv: list[str]) -> int:
    """Convert a file, write the recipe if asked to, and print it. Raises ``UserError``."""
    parser = Parser(
        prog="kit convert", description=HELP, epilog="Flags of a recipe override the file: --max_length 4096"
    )
    parser.add_argument("file", help="a YAML or JSON file of that kit", type=Path)
    parser.add_argument("--out", help="also write the recipe to this new file", type=Path)
    parser.add_argument(
        "--num_processes", help="number of processes (GPUs) of the original run; it sets the global batch", type=int
    )
    parser.add_argument("--drop", help="comma-separated keys to leave out although that changes training")
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
        problems.append(Problem("--out", f"{given.out} exists", "a new file", "--out my.yaml"))
    raise_if(problems)
    drop = [key.strip() for key in (given.drop or "").split(",") if key.strip()]
    draft = convert(given.file, given.num_processes, drop, flags)
    recipe = shlex.quote(str(given.out or "RECIPE.yaml"))
    command = f"{command_of('finetune.py')} --config {draft.config} --recipe {recipe}"
    if draft.config != "single":  # by itself it would take all GPUs, which the global batch was not made for
        command += f" --num_processes {draft.num_processes}"
    if draft.sequence_parallel > 1:
        command += f" --sequence_parallel_size {draft.sequence_parallel}"
    header = [f"Converted by kit convert from {given.file.name}, a file of {draft.kit}.", f"Launch: {command}"]
    if draft.num_processes == 1:
        sharded = "The weights were sharded" if draft.config.startswith("fsdp") else "One process"
        header.append(
            f"{sharded}: give --num_processes N if it ran on more GPUs, since the global batch depends on it."
        )
    text = recipe_text(draft, header)
    if given.out is not None:
        try:
            given.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError("--out", f"{given.out}: {error.strerror}", "a file that can be written") from None
    show(text.rstrip("\n"))
    return 0
