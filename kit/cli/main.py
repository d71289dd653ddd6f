"""The ``kit`` command: small tools around the recipes. Nothing here needs torch to answer.

A command is one entry in ``COMMANDS``: its help line, and a function of the remaining words that returns an
exit status. Heavy imports belong inside that function.
"""

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config.command_line import load_recipe, read_command_line, show
from kit.config.recipe import RECIPES, Recipe
from kit.errors import Problem, Problems, UserError, did_you_mean, raise_if
from kit.secrets import redacted

SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the comment at the top of a recipe says."""

    title: str
    launch: list[str]  # the words after the script
    model: str
    parameters: str  # "8.03B"
    hardware: str
    num_gpus: int  # 0: none needed
    gpu_gigabytes: int

    @property
    def num_parameters(self) -> float:
        return float(self.parameters.rstrip("KMB")) * SCALES[self.parameters.lstrip("0123456789.")]

    @property
    def config(self) -> str:
        """The Accelerate config its command names; ``-`` where the launcher decides."""
        return self.launch[self.launch.index("--config") + 1] if "--config" in self.launch else "-"


def read_header(path: Path) -> Header:
    """The four lines every shipped recipe begins with. Raises ``UserError`` where one is missing."""
    lines = path.read_text(encoding="utf-8").splitlines()[:4] + [""] * 4
    forms = {
        "title": r"# (.+)\.",
        "launch": r"# Launch: +accelerate launch recipes/finetune\.py(.*)",
        "model": r"# Model: +(\S+) \((\d[\d.]*[KMB]?) parameters\)",
        "hardware": r"# Hardware: +(.+)",
    }
    found = {key: re.fullmatch(form, line) for (key, form), line in zip(forms.items(), lines, strict=False)}
    places = {key: f"{path}:{number}" for number, key in enumerate(forms, 1)}
    raise_if(Problem(places[key], f"no {key} line", forms[key]) for key, match in found.items() if not match)
    title, launch, model, hardware = (match.groups() for match in found.values() if match)
    gpus = re.match(r"(\d+) GPUs? with (\d+) GB", hardware[0])
    return Header(
        title=title[0],
        launch=shlex.split(launch[0]),
        model=model[0],
        parameters=model[1],
        hardware=hardware[0],
        num_gpus=int(gpus[1]) if gpus else 0,
        gpu_gigabytes=int(gpus[2]) if gpus else 0,
    )


def recipes(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="kit recipes", description=COMMANDS["recipes"][0]).parse_args(argv)
    rows = []
    problems: list[Problem] = []
    for path in RECIPES.glob("*.yaml"):
        try:
            recipe, header = load_recipe(str(path)), read_header(path)
        except UserError as error:
            problems += error.problems
            continue
        gpus = f"{header.num_gpus} x {header.gpu_gigabytes} GB" if header.num_gpus else "none"
        cells = [path.stem, header.model, header.parameters, recipe.method, header.config, gpus]
        rows.append((header.num_parameters, cells))
    rows.sort()
    show(_table(["recipe", "model", "parameters", "method", "config", "GPUs"], [cells for _, cells in rows]))
    show("\nGPUs are planned from formulas, not measured.")
    show("Start one: accelerate launch recipes/finetune.py --config <config> --recipe <recipe>")
    raise_if(problems)
    return 0


def prepare(argv: list[str]) -> int:
    """Tokenise ahead of a run, on a machine without a GPU: the run then opens what is in the cache."""
    if {"-h", "--help"} & set(argv):
        show("usage: kit prepare [--recipe R] [--flag value ...]\n\n" + COMMANDS["prepare"][0] + ".")
        show("Takes the flags of recipes/finetune.py. With the same ones, and the same $KIT_CACHE, a run finds it all.")
        return 0
    from kit.cache import ENTRY, cache_folder
    from kit.data.feed.feed import Ranks
    from kit.run.log import silence_libraries

    def entries() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in cache_folder().glob(f"samples/[!.]*/{ENTRY}")}

    silence_libraries()
    before = entries()
    recipe, _, data = open_recipe_data(argv)
    if recipe.streaming:
        raise UserError(Problem("streaming", "nothing to prepare: a stream is read while training"))
    feed = data.open_feed(recipe, Ranks(), 0, {})
    num = len(entries() - before)
    done = f"{num} data set{'s' * (num > 1)} tokenised" if num else "nothing to do: all is there"
    lines = [f"{data.total_steps(recipe)} steps", f"cache: {cache_folder()}, {done}"]
    show("\n".join([*data.notes, *feed.notes(), *lines]))
    return 0


def open_recipe_data(argv: list[str]) -> tuple[Recipe, Any, Any]:
    """Recipe, tokenizer and data of a run with these flags. Raises ``UserError`` with everything that is wrong."""
    request = read_command_line(argv)
    raise_if(request.problems)
    assert request.recipe is not None
    recipe = request.recipe
    from kit.data import open as data
    from kit.model import load as model

    problems = Problems()
    sources = tokenizer = config = None
    with problems.caught():
        sources = data.open_sources(recipe)
    with problems.caught():
        tokenizer = model.open_tokenizer(recipe)
    with problems.caught():
        config = model.open_config(recipe)
        problems += model.check_model(recipe, config, model.build_meta_model(recipe, config))
    problems.raise_if_any()
    assert sources is not None and config is not None
    return recipe, tokenizer, data.open_data(recipe, sources, tokenizer, config.get_text_config().vocab_size)


def inspect(argv: list[str]) -> int:
    """Show what a run with these flags would learn from."""
    parser = argparse.ArgumentParser(
        prog="kit inspect",
        description=COMMANDS["inspect"][0] + ".",
        epilog="Takes the flags of recipes/finetune.py too: --recipe, --dataset, --chat_template, ...",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=int, default=5, metavar="N", help="samples to show (default: 5)")
    parser.add_argument("--html", metavar="FILE", help="write a page that opens in a browser without network")
    options, rest = parser.parse_known_args(argv)
    from kit.report import samples_page as inspection
    from kit.run.log import silence_libraries

    silence_libraries()
    raise_if([Problem("-n", f"found {options.n}", "whole number from 0")] if options.n < 0 else [])
    recipe, tokenizer, data = open_recipe_data(rest)
    if recipe.streaming:
        fix = "look at some of its files: leave --streaming out"
        raise UserError(Problem("streaming", "a stream cannot be looked at as a whole", fix=fix))
    gathered = inspection.look(recipe, tokenizer, data, options.n)
    show(inspection.as_text(gathered, colour=sys.stdout.isatty()))
    if options.html:
        try:
            Path(options.html).write_text(inspection.as_page(gathered), encoding="utf-8")
        except OSError as error:
            raise UserError(Problem("--html", f"{options.html}: {error.strerror}", "a file to write to")) from None
        show(f"\npage: {options.html}")
    return 0


def verify_resume(argv: list[str]) -> int:
    from kit.cli.verify_resume import verify_resume

    return verify_resume(argv)


def report(argv: list[str]) -> int:
    """Make the report of a run anew, also of one that was killed or still goes on."""
    parser = argparse.ArgumentParser(prog="kit report", description=COMMANDS["report"][0] + ".", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="its output_dir")
    options = parser.parse_args(argv)
    from kit.report.run_page import write_report

    show(f"report: {write_report(options.run)}")
    return 0


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "recipes": ("list the recipes, with the hardware each needs", recipes),
    "inspect": ("show samples as they are tokenised, with what is learned from marked", inspect),
    "prepare": ("tokenise the data of a run ahead of it, on a machine without a GPU", prepare),
    "report": ("write report.html of a run as far as it has come: curves, evaluations, data", report),
    "verify-resume": ("kill a short run with your flags, continue it, and compare bit for bit", verify_resume),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 2 where the user can mend something."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        lines = [f"  {command:<14} {about}" for command, (about, _) in COMMANDS.items()]
        show("\n".join(["usage: kit <command> [--help]", "", *lines]))
        return 0
    try:
        if name not in COMMANDS:
            names = ", ".join(COMMANDS)
            raise UserError(Problem(f"kit {name}", "unknown command", names, did_you_mean(name, COMMANDS)))
        return COMMANDS[name][1](rest)
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(redacted(str(error)), file=sys.stderr)
        return error.exit_status
    except Exception:
        print(redacted(traceback.format_exc()), file=sys.stderr)
        return 1


def _table(titles: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
