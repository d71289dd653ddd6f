"""A step of more micro-batches makes the host wait for the device no more often."""

from dataclasses import replace

import pytest
from helpers import ROOT

from benchmarks.simulation.simulate import simulate
from kit.memory.workload import Workload
from kit.strategy.strategies import FSDP2
from kit.tools.plan.models import find_shape


@pytest.mark.slow
def test_a_further_micro_batch_waits_for_no_number_of_the_device():
    shape = {"shape": find_shape(str(ROOT / "recipes/tiny/model")), "length": 128, "rows": 2}
    step = Workload(**shape, method="lora", strategy=FSDP2, num_gpus=8, gradient_checkpointing=True)
    one, three = (simulate(replace(step, micro_batches=number)) for number in (1, 3))
    assert three.launches > 2 * one.launches and three.waits == one.waits
