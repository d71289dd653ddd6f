"""Settings that help are listed, the cheapest first, in two groups: the run can continue with them, or not."""

import re

import pytest
import torch
from memory_helpers import GIB, ON_CPU, ON_GPU, PHASE, make, message_of, placed
from transformers import LlamaConfig, LlamaForCausalLM

from kit.config.conflicts import find_conflicts
from kit.config.recipe import Recipe
from kit.memory.advice import changes, explain
from kit.memory.shortage import COMPONENTS, Device, Shortage
from kit.run.identity import identity
from kit.strategy import launch
from kit.strategy.strategies import FSDP2

CPU = Device("CPU", 80 * GIB, GIB, 78 * GIB)
GPU = Device("GPU 0", 80 * GIB, GIB, 78 * GIB)


def short(phase, device):
    return Shortage(PHASE[phase], "", 0, device, dict.fromkeys(COMPONENTS, 0), rank=None)


@pytest.mark.parametrize(
    ("settings", "phase", "device", "place", "expected"),
    [
        # The batch first, then recomputation, then more GPUs; then what makes another run.
        ({}, "training", GPU, {}, "per_device_train_batch_size=2 gradient_checkpointing=true config=fsdp "
         "optim=adamw_8bit method=qlora max_length=1024"),
        ({"gradient_checkpointing": True, "method": "qlora"}, "training", GPU, {}, "per_device_train_batch_size=2 "
         "activation_offload=true config=fsdp optim=adamw_8bit max_length=1024"),
        # 10 over 2 processes is 5 each, of which 2 is no divisor.
        ({"global_batch_size": 10, "per_device_train_batch_size": 5, "method": "full"}, "training", GPU,
         {"num_processes": 2, "strategy": FSDP2}, "per_device_train_batch_size=1 gradient_checkpointing=true "
         "config=fsdp_offload method=lora max_length=1024"),
        # Shards take no bitsandbytes optimiser.
        ({"optim": "adamw_8bit"}, "training", GPU, {},
         "per_device_train_batch_size=2 gradient_checkpointing=true method=qlora max_length=1024"),
        ({}, "loading", GPU, {}, "config=fsdp method=qlora"),
        ({}, "evaluation", GPU, {}, "per_device_eval_batch_size=1 config=fsdp method=qlora max_length=1024"),
        ({}, "training", CPU, {"device_type": "cpu"}, "per_device_train_batch_size=2 async_save=false "
         "gradient_checkpointing=true optim=adamw_8bit method=qlora max_length=1024"),
        # What a GPU computes does not fill the memory of the CPU.
        ({}, "training", CPU, {}, "async_save=false"),
    ],
)  # fmt: skip
def test_what_applies_is_suggested_the_cheapest_first(settings, phase, device, place, expected):
    recipe = make(**{"method": "lora"} | settings)
    found = changes(short(phase, device), recipe, placed(**{"device_type": "cuda"} | place))
    assert [f"{change.key}={change.value}" for change in found] == expected.split()


@pytest.mark.parametrize("phase", ["the forward pass", "generation"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_continues_with_the_first_group_only_and_every_change_is_allowed(phase, method):
    """As the output folder, the recipe and the launch decide it."""
    recipe = make(method=method, eval_split_size=2, predict_with_generate=True)
    error = torch.OutOfMemoryError(ON_GPU)
    text = str(explain(error, None, None, recipe, placed(device_type="cuda")))
    assert "--config fsdp " in text
    for is_other, part in enumerate(text.split("-> these make it another run")):
        for key, value in re.findall(r"^ +--(\w+) (\S+)", part, re.M):
            if key != "config":
                changed = Recipe(**recipe.model_dump() | {key: value})
                assert changed != recipe and not find_conflicts(changed, {}, set()), key
                assert not launch._batch_problems(changed, 1), key
                assert (identity(changed, "x", "base") != identity(recipe, "x", "base")) == is_other, key


def test_a_command_that_trains_nothing_gets_no_setting_of_training():
    """It has no step, no checkpoint and no run that could go on."""
    error = torch.OutOfMemoryError(ON_GPU)
    text = str(explain(error, None, None, make(method="full"), placed(device_type="cuda"), trains=False))
    assert re.findall(r"^ +--(\w+)", text, re.M) == ["per_device_eval_batch_size", "config", "max_length"]
    assert "the same command with one of these; cheapest first" in text and "checkpoint" not in text


def test_a_gpu_that_is_full_is_compared_with_the_plan():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=320
    )
    model = LlamaForCausalLM(config)
    text = message_of(torch.OutOfMemoryError(ON_GPU), model, topology=placed(device_type="cuda"), method="full")
    assert re.search(r"^ +taken +planned$", text, re.M)
    assert re.search(r"^ +optimiser +0 bytes +\d+\.\d KiB$", text, re.M)
    assert "planned" not in message_of(RuntimeError(ON_CPU), model, method="full")
