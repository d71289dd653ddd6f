"""Writes the tables in the headers of the recipes, and that of docs/quickstart.md.

    python docs/recipe_headers.py

A header has for each method the smallest of the usual machines that it fits, and its speed there.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.config.command_line import read_recipe
from kit.config.hints import recipe_names
from kit.config.paths import RECIPES
from kit.config.recipe import DEFAULT_RECIPE, Recipe
from kit.memory.fit import checkpointing_word
from kit.memory.shape import Shape
from kit.memory.workload import Workload
from kit.tools.plan.hardware import GPUS, Gpu
from kit.tools.plan.models import find_shape
from kit.tools.plan.search import METHODS, Option, best_of, strategies, tuned
from kit.tools.text_table import text_table

QUICKSTART = Path(__file__).with_name("quickstart.md")
# Machines that people have, the cheapest first: a key of ``GPUS``, what its memory is called, the number of GPUs, and
# GiB of host memory of one machine, which has up to eight. The last ones hold every recipe without offloading, so that
# ``fewest``, which tries more GPUs before it offloads, says the same.
Machine = tuple[str, str, int, int]
MACHINES: tuple[Machine, ...] = (
    ("rtx3060", "12 GB", 1, 32),
    ("rtx4060ti", "16 GB", 1, 32),
    ("rtx4090", "24 GB", 1, 64),
    ("rtx4090", "24 GB", 2, 128),
    ("l40s", "48 GB", 1, 128),
    ("rtx4090", "24 GB", 4, 256),
    ("h100", "80 GB", 1, 256),
    ("h100", "80 GB", 8, 2048),
    ("h100", "80 GB", 16, 2048),
    ("h100", "80 GB", 32, 2048),
)
TITLES = ("method", "config", "GPUs", "micro-batch", "checkpointing", "GiB per GPU", "tokens/s per GPU")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one method needs, and does."""

    machine: str  # "2 x 24 GB (RTX 4090)"
    option: Option

    @property
    def cells(self) -> list[str]:
        """The cells of the table, in the order of ``TITLES``."""
        own, step = self.option.workload, self.option.step
        low, high = step.tokens_per_second if step else (0.0, 0.0)
        peak = f"{self.option.memory.peak / 2**30:.1f}"
        batch = [str(own.rows), checkpointing_word(own.gradient_checkpointing)]
        return [own.method, own.config, self.machine, *batch, peak, f"{_rounded(low)} to {_rounded(high)}"]


def largest(recipes: Mapping[str, tuple[Recipe, Shape]], machines: Sequence[Machine] = MACHINES) -> list[str]:
    """Return a table in Markdown: for each machine and method the largest model whose recipe fits, and its config.

    Models that train on images are left out.

    Args:
        recipes: by their names, which end with the method.
    """
    lines = [f"| GPUs | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    for machine in machines:
        cells = [_name(machine)]
        for method in METHODS:
            own = [name for name, (recipe, _) in recipes.items() if recipe.method == method and not recipe.max_pixels]
            own.sort(key=lambda name: -recipes[name][1].num_parameters)
            ways = ((name, _way(*recipes[name], [machine])) for name in own)
            cell = next((f"`{name}`, `{way.workload.config}`" for name, way in ways if way), "-")
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row(recipe: Recipe, shape: Shape) -> Row | None:
    """Return the row of the recipe's method; None if it fits none of the machines."""
    best = _way(recipe, shape, MACHINES)
    if best is None:
        return None
    own = next(m for m in MACHINES if (GPUS[m[0]].name, m[2]) == (best.gpu.name, best.workload.num_gpus))
    return Row(machine=_name(own), option=best)


def _name(machine: Machine) -> str:
    key, size, num_gpus, _ = machine
    return f"{num_gpus} x {size} ({GPUS[key].name.removesuffix(f' {size}')})"


def _way(recipe: Recipe, shape: Shape, machines: Sequence[Machine]) -> Option | None:
    """The way to run the recipe on the first of ``machines`` that it fits."""
    known = [(replace(GPUS[key], host=gib * 2**30), num) for key, _, num, gib in machines]
    return smallest(Workload.of(recipe, shape), recipe.global_batch_size, known)


def smallest(base: Workload, global_batch_size: int, machines: Iterable[tuple[Gpu, int]]) -> Option | None:
    """Return the best way to run ``base``, its method kept, on the first of ``machines`` that it fits; None if none.

    The best is the simplest of those that are about the fastest. Weights and optimiser are offloaded only where nothing
    else fits any of the machines. GPUs that do not divide the global batch are passed over.

    Args:
        machines: GPUs that someone may have, and their numbers.
    """
    found = [_fitting(replace(base, num_gpus=num), global_batch_size, gpu) for gpu, num in machines]
    for offloads in (False, True):
        for ways in found:
            own = [option for option in ways if option.workload.strategy.offloads == offloads]
            if own:
                return best_of(own)
    return None


def _fitting(base: Workload, global_batch_size: int, gpu: Gpu) -> list[Option]:
    """The ways in which ``base`` fits, its method and the number of its GPUs kept."""
    if global_batch_size % base.num_gpus:
        return []
    found = [tuned(way, gpu, global_batch_size) for way in strategies(base)]
    return [option for option in found if option]


def renewed(text: str, method: str, rows: Sequence[Row]) -> str:
    """Return the text of a recipe file with a new table, and with the config of its own ``method`` in the command."""
    config = next(each.option.workload.config for each in rows if each.option.workload.method == method)
    lines = re.sub(r"(# Launch: .* --config )\S+", rf"\g<1>{config}", text).splitlines()
    comments = [f"# {line}" for line in text_table([dict(zip(TITLES, each.cells, strict=True)) for each in rows])]
    first = next(i for i, line in enumerate(lines) if line.startswith(f"# {TITLES[0]} "))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("#"))
    return "\n".join([*lines[:first], *comments, *lines[last:]]) + "\n"


def _rounded(number: float) -> str:
    """Two digits: the formulas know no more."""
    return f"{float(f'{number:.2g}'):,.0f}"


def recipes() -> dict[str, tuple[Recipe, Shape]]:
    """All recipes for a size of model, by name, with the shape of their model."""
    loaded = {name: read_recipe(["--recipe", name]) for name in recipe_names() if not name.startswith(DEFAULT_RECIPE)}
    return {name: (recipe, find_shape(recipe.model_name_or_path)) for name, recipe in loaded.items()}


def pages() -> dict[Path, str]:
    """The text of each file as it should be."""
    known = recipes()
    found = {}
    for path in sorted({RECIPES / f"{name.rpartition('-')[0]}.yaml" for name in known}):
        rows = [row(*known[name]) for name in known if name.rpartition("-")[0] == path.stem]
        text = path.read_text(encoding="utf-8")
        found[path] = renewed(text, read_recipe(["--recipe", path.stem]).method, [each for each in rows if each])
    before, begin, rest = QUICKSTART.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    found[QUICKSTART] = before + begin + "\n".join(["", *largest(known, MACHINES), "", ""]) + end + after
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
