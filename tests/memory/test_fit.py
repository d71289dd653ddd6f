"""A run reports the memory it needs, and one that cannot fit is refused before anything is loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kit.config.command_line import read_recipe
from kit.memory.fit import memory_problems, plan_record, planned_workload, resolve_auto
from kit.memory.formulas import predict
from kit.strategy.strategies import DDP, FSDP1, FSDP2, SINGLE
from kit.strategy.topology import Topology
from kit.tools.plan.models import SHAPES

GPU = Topology(strategy=FSDP2, config_name="fsdp", num_processes=8, mixed_precision="bf16", device_type="cuda")
RECIPE = read_recipe(["--recipe", "llama-8b-full"])


@pytest.fixture(scope="module")
def config():
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(SHAPES / "llama-8b")


@pytest.fixture
def gpus(monkeypatch):
    def set_gib(*sizes):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        properties = [SimpleNamespace(total_memory=int(size * 2**30)) for size in sizes]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])

    return set_gib


def test_what_the_formulas_do_not_describe_is_neither_planned_nor_refused(config, gpus):
    gpus(1.0)
    mixtral = SimpleNamespace(to_dict=lambda: {"model_type": "mixtral"})
    frozen = RECIPE.model_copy(update={"freeze": ["model.embed_tokens*"]})
    for case in ((RECIPE, GPU, mixtral), (frozen, GPU, config), (RECIPE, replace(GPU, strategy=FSDP1), config)):
        assert planned_workload(*case) is None
    quantised = RECIPE.model_copy(update={"method": "qlora"})
    # Every rank loads for itself, and holds the whole model meanwhile.
    assert planned_workload(quantised, GPU, config) is None
    assert planned_workload(quantised, replace(GPU, load_on_rank0=True), config) is not None
    assert (plan_record(None, GPU), memory_problems(None, GPU)) == ({}, [])


def test_a_run_is_refused_only_if_its_tensors_do_not_fit(config, gpus):
    own = planned_workload(RECIPE, GPU, config)
    tensors = predict(own).tensors / 2**30
    gpus(80.0, tensors * 0.96)
    assert memory_problems(own, GPU) == []
    gpus(80.0, tensors * 0.94)
    (problem,) = memory_problems(own, GPU)
    assert "memory: the run needs about" in str(problem) and "--skip_memory_check" in str(problem)
    assert memory_problems(own, replace(GPU, device_type="cpu", cpu_dry_run=True)) == []


@pytest.mark.parametrize(
    ("gib", "rows", "checkpointing"),
    # Where there is room, no checkpointing and a micro-batch of 16,384 tokens; then fewer rows; then checkpointing.
    [(200, 4, False), (60, 1, False), (36, 1, "selective"), (24, 2, True), (8, 1, True)],
)
def test_auto_takes_what_is_best_on_the_gpus_of_the_machine(config, gpus, gib, rows, checkpointing):
    auto = {"max_length": 4096, "torch_compile": False}
    recipe = read_recipe(["--recipe", "llama-8b-lora"]).model_copy(update=auto)
    alone = replace(GPU, strategy=SINGLE, num_processes=1)
    gpus(gib)
    resolved, _ = resolve_auto(recipe, alone, config)
    assert (resolved.per_device_train_batch_size, resolved.gradient_checkpointing) == (rows, checkpointing)
    if gib > 8:
        assert memory_problems(planned_workload(resolved, alone, config), alone) == []


def test_auto_takes_what_fits_half_of_the_memory_of_a_machine_without_gpus(config, monkeypatch):
    auto = {"max_length": 4096, "torch_compile": False}
    on_cpu = replace(GPU, strategy=DDP, num_processes=2, mixed_precision="no", device_type="cpu")
    lora = read_recipe(["--recipe", "llama-8b-lora"]).model_copy(update=auto)
    for gib, rows, checkpointing in ((2000, 4, False), (200, 2, True), (8, 1, False)):
        monkeypatch.setattr("kit.memory.fit.host_memory", lambda gib=gib: (gib * 2**30, 0))
        for recipe in (lora, lora.model_copy(update={"trainable_tokens": ["<a>"]})):
            resolved, lines = resolve_auto(recipe, on_cpu, config)
            assert (resolved.per_device_train_batch_size, resolved.gradient_checkpointing) == (rows, checkpointing)
            assert lines == []


def test_a_run_says_what_auto_took_without_a_plan_and_why(config, gpus):
    gpus(80.0)
    alone = replace(GPU, strategy=SINGLE, num_processes=1)

    def lines_of(topology=alone, **keys):
        recipe = read_recipe(["--recipe", "llama-8b-lora"]).model_copy(update=keys)
        return resolve_auto(recipe, topology, config)[1]

    taken = "micro-batch 1, gradient checkpointing on"
    assert lines_of(use_dora=True, new_tokens=["<a>"]) == [f"auto: no plan for --use_dora, --new_tokens: {taken}"]
    assert lines_of(freeze=["*"], gradient_checkpointing=False) == ["auto: no plan for --freeze: micro-batch 1"]
    assert lines_of(replace(GPU, strategy=FSDP1)) == [f"auto: no plan for fsdp1: {taken}"]
    assert lines_of() == lines_of(replace(alone, device_type="cpu"), use_dora=True) == []
    gpus(8.0)
    assert lines_of() == [f"auto: nothing fits by the plan: {taken}"]
