"""``kit recipes``: list the shipped recipes, from the comments at the top of their files."""

import re

from kit.config.commands import command_of
from kit.config.paths import RECIPES
from kit.system.console import Parser, show
from kit.system.visible import joined
from kit.tools.text_table import text_table

HELP = "list the recipes with the hardware that each needs"
_MODEL = re.compile(r"^# Model: +(\S+) \(((\d[\d.]*)([MB]) parameters)\)$", re.MULTILINE)
_UNGATED = re.compile(r"^# Ungated: +(\S+ \(.+\))$", re.MULTILINE)
# What a method needs: the cells of ``_COLUMNS`` from its config on.
_NEEDS = re.compile(r"^# (full|lora|qlora) +(\S+) +(\d+ x .+?\)) +(\d+) +(\w+) +([\d.]+) +(\S+ to \S+)$", re.MULTILINE)
_COLUMNS = ("recipe", "size", "config", "GPUs", "micro-batch", "checkpointing", "GiB per GPU", "tokens/s per GPU")


def run(argv: list[str]) -> int:
    """Print a table of all recipes, the smallest model first."""
    Parser(prog="kit recipes", description=HELP).parse_args(argv)
    rows, open_models = [], {}
    for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
        text = path.read_text(encoding="utf-8")
        model, parameters, number, unit = found.groups() if (found := _MODEL.search(text)) else ("-", "-", "0", "M")
        for method, *needs in _NEEDS.findall(text) or [("", "-", "none", *"----")]:
            name = f"{path.stem}-{method}" if method else path.stem
            cells = [name, parameters.removesuffix(" parameters"), *needs]
            rows.append((float(number) * (1000 if unit == "B" else 1), dict(zip(_COLUMNS, cells, strict=True))))
        if ungated := _UNGATED.search(text):
            open_models[model] = ungated[1]
    rows.sort(key=lambda row: row[0])
    show(joined(text_table([row for _, row in rows])))
    show("\nPlanned, not measured, for the smallest common machine of up to 32 GPUs.")
    show("`kit plan --recipe R --gpu G` plans a recipe on your GPUs.")
    show(f"Start: {command_of('finetune.py')} --config <config> --recipe <recipe>")
    if open_models:
        show("\nLlama is gated: it needs a login and a licence on the hub. Ungated models for the same recipes:")
        for model, ungated_model in open_models.items():
            show(f"  {model:<10} --model_name_or_path {ungated_model}")
    return 0
