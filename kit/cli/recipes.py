"""``kit recipes``: list the shipped recipes, from the headers of their files."""

import argparse
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from kit.config.hints import METHODS
from kit.config.json_schema import json_schema
from kit.config.recipe import RECIPES
from kit.config.validation import load_recipe
from kit.console import show
from kit.errors import Problem, UserError, raise_if

HELP = "list the recipes, with the hardware each needs"
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Hardware:
    """What one method needs: a row of the table in a recipe's header."""

    config: str  # the Accelerate config; ``-`` if none is needed
    num_gpus: int  # 0: no GPU needed
    gpu_gigabytes: int  # memory of each GPU


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a recipe file: the lines of comment after that for editors."""

    title: str
    launch: list[str]  # the words after the script in its command
    model: str  # hub id, or a folder in recipes/shapes/
    parameters: str  # number of parameters as text: "8.03B"
    hardware: dict[str, Hardware]  # by method; empty if the recipe needs no GPU
    ungated: str = ""  # hub id and licence of a model of that size that anyone may download

    @property
    def num_parameters(self) -> float:
        """The number of parameters as a number."""
        return float(self.parameters.rstrip("KMB")) * SCALES[self.parameters.lstrip("0123456789.")]


def read_header(path: Path) -> Header:
    """Read the header of a recipe file. Raises ``UserError`` if one of its three lines is missing."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() + [""] * 4
    first = lines[0].startswith("# yaml-language-server:")
    forms = {
        "title": r"# (.+)\.",
        "launch": r"# Launch: +accelerate launch recipes/finetune\.py(.*)",
        "model": r"# Model: +(\S+) \((\d[\d.]*[KMB]?) parameters\)",
    }
    found = {key: re.fullmatch(form, line) for (key, form), line in zip(forms.items(), lines[first:], strict=False)}
    where = {key: f"{path}:{number}" for number, key in enumerate(forms, 1 + first)}
    raise_if(Problem(where[key], f"no {key} line", forms[key]) for key, match in found.items() if not match)
    title, launch, model = (match.groups() for match in found.values() if match)
    ungated = re.search(r"^# Ungated: +(\S+ \(.+\))$", text, re.MULTILINE)
    rows = re.findall(rf"^# ({'|'.join(METHODS)}) +(\S+) +(\d+) x (\d+) GB\b", text, re.MULTILINE)
    return Header(
        title=title[0],
        launch=shlex.split(launch[0]),
        model=model[0],
        parameters=model[1],
        hardware={method: Hardware(config, int(num), int(size)) for method, config, num, size in rows},
        ungated=ungated[1] if ungated else "",
    )


def run(argv: list[str]) -> int:
    """Print a table of all recipes, or the schema of one. Then raise ``UserError`` if a recipe cannot be read."""
    parser = argparse.ArgumentParser(prog="kit recipes", description=HELP)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a recipe, for editors")
    if parser.parse_args(argv).schema:
        show(json.dumps(json_schema(), indent=1))
        return 0
    rows = []
    open_models: dict[str, str] = {}
    problems: list[Problem] = []
    for path in RECIPES.glob("*.yaml"):
        try:
            recipe, header = load_recipe(str(path)), read_header(path)
        except UserError as error:
            problems += error.problems
            continue
        for method, needs in header.hardware.items():
            gpus = f"{needs.num_gpus} x {needs.gpu_gigabytes} GB"
            cells = [f"{path.stem}-{method}", header.model, header.parameters, method, needs.config, gpus]
            rows.append((header.num_parameters, cells))
        if not header.hardware:
            rows.append(
                (header.num_parameters, [path.stem, header.model, header.parameters, recipe.method, "-", "none"])
            )
        if header.ungated:
            open_models[header.model] = header.ungated
    rows.sort()
    show(_table(["recipe", "model", "parameters", "method", "config", "GPUs"], [cells for _, cells in rows]))
    show("\nGPUs are planned from formulas, not measured.")
    show("Start one: accelerate launch recipes/finetune.py --config <config> --recipe <recipe>")
    if open_models:
        show("\nLlama needs a login and a licence at the hub. Models of about its sizes without, for the same recipes:")
        order = [cells[1] for _, cells in rows]
        for model in sorted(open_models, key=order.index):
            show(f"  {model:<10} --model_name_or_path {open_models[model]}")
    raise_if(problems)
    return 0


def _table(titles: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
    return "\n".join(line.rstrip() for line in lines)
