"""The operations of a step follow the counts that others publish."""

from dataclasses import replace

import pytest

from kit.memory.operations import operations_per_token
from kit.memory.workload import Workload
from kit.strategy.strategies import FSDP2
from kit.tools.plan.models import find_shape

BASE = Workload(shape=find_shape("llama-8b"), method="full", strategy=FSDP2, num_gpus=8, length=4096)


def test_operations_are_six_per_weight_plus_attention():
    short = replace(BASE, length=1, loss="whole")
    weights = short.shape.num_parameters - short.shape.embedding_parameters
    assert operations_per_token(short) == pytest.approx(6 * weights, rel=1e-3)
    more = operations_per_token(replace(BASE, loss="whole")) - operations_per_token(short)
    assert more == pytest.approx(6 * 32 * 4096 * 4095)  # layers, width of queries, tokens seen
    assert operations_per_token(BASE, seen=512) < operations_per_token(BASE)
    assert operations_per_token(BASE, supervised=0.1) < operations_per_token(BASE)


def test_checkpointing_costs_a_forward_pass_and_adapters_save_the_weights_gradients():
    forward = 2 * BASE.shape.num_layers * (BASE.shape.layer_linear_weights + BASE.shape.query_size * BASE.length)
    on = operations_per_token(replace(BASE, gradient_checkpointing=True))
    assert on - operations_per_token(BASE) == pytest.approx(forward)
    lora = operations_per_token(replace(BASE, method="lora"))
    selective = replace(BASE, method="lora", gradient_checkpointing="selective")
    assert operations_per_token(selective) - lora == 2 * selective.adapter_parameters
    assert operations_per_token(replace(selective, method="full")) == operations_per_token(BASE)
    assert 0.6 < lora / operations_per_token(BASE) < 0.75
