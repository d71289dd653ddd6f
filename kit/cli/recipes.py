"""``kit recipes``: list the shipped recipes, from the headers of their files."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from kit.config.hints import METHODS
from kit.config.json_schema import json_schema
from kit.config.recipe import RECIPES
from kit.config.scripts import command_of
from kit.config.validation import load_recipe
from kit.console import Parser, show
from kit.errors import Problem, UserError, raise_if
from kit.tools.text_table import text_table
from kit.visible import joined

HELP = "list the recipes, with the hardware each needs"
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class MethodNeeds:
    """What one method needs: a row of the table in a recipe's header."""

    config: str  # the Accelerate config
    gpus: str  # "2 x 24 GB (RTX 4090)"
    gib: str  # of a GPU's memory
    speed: str  # tokens per second of a GPU: "480 to 800"


@dataclass(frozen=True, kw_only=True)
class RecipeHeader:
    """The header of a recipe file: the lines of comment after that for editors."""

    title: str
    launch: list[str]  # the words after the script in its command
    model: str  # hub id, or a folder in recipes/shapes/
    parameters: str  # number of parameters as text: "8.03B"
    needs: dict[str, MethodNeeds]  # by method; empty if the recipe needs no GPU
    ungated: str = ""  # hub id and licence of a model of that size that anyone may download

    @property
    def num_parameters(self) -> float:
        """The number of parameters as a number."""
        return float(self.parameters.rstrip("KMB")) * SCALES[self.parameters.lstrip("0123456789.")]


def read_header(path: Path) -> RecipeHeader:
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
    rows = re.findall(rf"^# ({'|'.join(METHODS)}) +(\S+) +(\d+ x .+?\)) +([\d.]+) +(\S+ to \S+)$", text, re.MULTILINE)
    return RecipeHeader(
        title=title[0],
        launch=shlex.split(launch[0]),
        model=model[0],
        parameters=model[1],
        needs={method: MethodNeeds(*cells) for method, *cells in rows},
        ungated=ungated[1] if ungated else "",
    )


def run(argv: list[str]) -> int:
    """Print a table of all recipes, or the schema of one. Then raise ``UserError`` if a recipe cannot be read."""
    parser = Parser(prog="kit recipes", description=HELP)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a recipe, for editors")
    flags = parser.parse_args(argv)
    if flags.schema:
        show(json.dumps(json_schema(), indent=1))
        return 0
    headers, problems = _headers()
    rows = []
    for name, header in headers.items():
        needed: dict[str, MethodNeeds | None] = {**header.needs} or {"": None}
        for method, needs in needed.items():
            row = {"recipe": f"{name}-{method}" if method else name, "model": header.model}
            row |= {"parameters": header.parameters, "config": needs.config if needs else "-"}
            row |= {"GPUs": needs.gpus if needs else "none", "GiB of a GPU": needs.gib if needs else "-"}
            rows.append(row | {"tokens/s of a GPU": needs.speed if needs else "-"})
    show(joined(text_table(rows)))
    show("\nPlanned, not measured, for the smallest of the usual machines of up to 32 GPUs.")
    show("`kit plan --recipe R --gpu G` says what a recipe does on your GPUs, and why.")
    show(f"Start one: {command_of('finetune.py')} --config <config> --recipe <recipe>")
    open_models = {header.model: header.ungated for header in headers.values() if header.ungated}
    if open_models:
        show("\nLlama needs a login and a licence at the hub. Models of about its sizes without, for the same recipes:")
        for model, ungated in open_models.items():
            show(f"  {model:<10} --model_name_or_path {ungated}")
    raise_if(problems)
    return 0


def _headers() -> tuple[dict[str, RecipeHeader], list[Problem]]:
    """The headers of all recipes by name, the smallest model first, and problems with those that cannot be read."""
    headers: dict[str, RecipeHeader] = {}
    problems: list[Problem] = []
    for path in RECIPES.glob("*.yaml"):
        try:
            load_recipe(str(path))
            headers[path.stem] = read_header(path)
        except UserError as error:
            problems += error.problems
    return dict(sorted(headers.items(), key=lambda entry: (entry[1].num_parameters, entry[0]))), problems
