"""The strategy of a run in one line and in run.json."""

import json

import pytest
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.strategy.topology import ActualStrategy, Topology

ALONE = {"type": "single", "num_processes": 1, "sharded_layers": None}


def recipe(**settings):
    return Recipe(model_name_or_path="m", dataset="d", **settings)


def test_one_line_describes_the_strategy():
    cases = [
        (
            {"type": "fsdp2", "num_processes": 4, "num_replicas": 2, "device": "NVIDIA H100"},
            {"gradient_checkpointing": False},
            "FSDP2, 4 processes, bf16, 4 x LlamaDecoderLayer sharded, 2 replicas, 1,234,567 trainable parameters "
            "(lora), global batch 32 = 4 (ranks) x 1 (micro-batch) x 8 (accumulation)",
        ),
        (
            {**ALONE, "cpu_dry_run": True, "mixed_precision": "no"},
            {"method": "full", "gradient_checkpointing": "selective", "optim": "adamw_bf16"},
            "Single (dry run on CPU), 1 process, fp32, 1,234,567 trainable parameters (full), selective gradient "
            "checkpointing, adamw_bf16, global batch 32 = 1 (ranks) x 1 (micro-batch) x 32 (accumulation)",
        ),
    ]
    for strategy, settings, line in cases:
        asked = recipe(**settings)
        assert actual_strategy(**strategy).describe(asked, asked) == line, (strategy, settings, line)


def test_a_strategy_is_the_same_after_it_was_written_down():
    for changes in ({}, ALONE):
        strategy = actual_strategy(**changes)
        record = json.loads(json.dumps(strategy.record()))
        assert ActualStrategy.from_record(record | {"of_a_later_version": 1}) == strategy
    for wrong in ({"num_processes": -1}, {"device": None}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ActualStrategy.from_record(record | wrong)


def topology(strategy, num_processes=2, device="cuda", **more):
    values = {"strategy": strategy, "num_processes": num_processes, "device_type": device}
    return Topology(config_name="mine", mixed_precision="bf16", **values, **more)
