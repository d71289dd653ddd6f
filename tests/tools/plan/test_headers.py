"""The table in a recipe's header is what the plan says now, and shows machines that the recipe fits."""

import runpy
import sys
from dataclasses import replace

import pytest

from kit.config.hints import recipe_names
from kit.config.recipe import RECIPES, ROOT
from kit.config.validation import load_recipe
from kit.strategy.strategies import SINGLE
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.headers import MACHINES, renewed, row
from kit.tools.plan.models import find_shape
from kit.tools.plan.search import fewest

NAMES = [name for name in recipe_names() if not name.startswith("tiny")]


def row_of(name):
    recipe = load_recipe(name)
    return row(recipe, find_shape(recipe.model_name_or_path))


def test_the_headers_of_the_recipes_and_the_tables_of_the_pages_are_current(monkeypatch):
    """Else: python docs/recipe_headers.py"""
    monkeypatch.setattr("sys.path", [*sys.path])
    pages = runpy.run_path(str(ROOT / "docs/recipe_headers.py"))["pages"]()
    assert {path.stem for path in pages} == {name.rpartition("-")[0] for name in NAMES} | {"questions", "README"}
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_machine_and_uses_half_of_a_gpu_unless_it_is_the_smallest(name):
    option = row_of(name).option
    key, _, num_gpus, host = next(m for m in MACHINES if f"{m[2]} x {m[1]}" in row_of(name).machine)
    share = option.memory.peak / GPUS[key].memory
    assert share <= 0.95 and option.workload.num_gpus == num_gpus
    assert share > 0.5 or key == MACHINES[0][0] or option.workload.strategy.offloads
    assert sum(option.memory.host.values()) <= host * 2**30


@pytest.mark.parametrize("name", NAMES)
def test_a_header_offloads_only_where_the_plan_does_with_any_number_of_such_gpus(name):
    option, recipe = row_of(name).option, load_recipe(name)
    own = option.workload
    more = fewest(replace(own, strategy=SINGLE, num_gpus=1), recipe.global_batch_size, option.gpu)
    assert own.strategy.offloads == more.workload.strategy.offloads
    assert more.workload.num_gpus <= own.num_gpus


def test_a_stale_header_is_renewed_with_its_command():
    text = (RECIPES / "llama-8b.yaml").read_text(encoding="utf-8")
    rows = [row_of(f"llama-8b-{method}") for method in ("full", "lora", "qlora")]
    stale = text.replace("--config single", "--config ddp").replace("1 x 24 GB (RTX 4090)", "1 x 8 GB (RTX 1)")
    assert stale != text and renewed(stale, "lora", rows) == text
    assert "--config fsdp --recipe" in renewed(text, "full", rows)


def test_what_fits_no_machine_has_no_row():
    recipe = load_recipe("llama-70b-full")
    assert row(recipe, replace(find_shape("llama-70b"), num_layers=8000)) is None
