"""Time by formulas: ranges in which published runs lie."""

import runpy
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.memory.workload import Workload
from kit.strategy.strategies import FSDP2, SINGLE
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.models import find_shape
from kit.tools.plan.speed import step

H100 = GPUS["h100"]
BASE = Workload(shape=find_shape("llama-8b"), method="full", strategy=FSDP2, num_gpus=8, length=4096)


def test_published_runs_lie_in_the_range_or_the_table_says_why_not():
    rows = runpy.run_path(str(ROOT / "benchmarks/plan_accuracy.py"))["ROWS"]
    plain = [row for row in rows if row.tokens_per_second and not row.not_modelled]
    assert len(plain) >= 5
    for row in plain:
        low, high = step(row.workload, row.gpu).tokens_per_second
        assert low * 0.95 < row.tokens_per_second < high * 1.07, row.name


def test_the_host_bounds_the_step_of_a_small_model_and_larger_micro_batches_or_compiled_layers_help():
    small = replace(BASE, shape=find_shape("smollm2-135m"), strategy=SINGLE, num_gpus=1, length=128)
    found = step(small, H100)
    assert found.seconds[0] == pytest.approx(found.launches * 5e-6)
    assert step(replace(small, rows=8), H100).tokens_per_second[1] > 7 * found.tokens_per_second[1]
    assert step(replace(small, torch_compile=True), H100).launches < found.launches / 2
