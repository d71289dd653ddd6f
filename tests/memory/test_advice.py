"""Settings that help are listed, the cheapest first, in two groups: the run can continue with them, or not."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from memory_helpers import GIB, ON_CPU, ON_GPU, PHASE, make, message_of, placed
from transformers import LlamaConfig

from kit.config.conflicts import find_conflicts
from kit.config.recipe import ACCELERATE_CONFIGS, Recipe
from kit.config.settings.data import DataSettings
from kit.config.validation import load_recipe
from kit.memory import advice
from kit.memory import shortage as memory
from kit.memory.advice import explain, setting_changes
from kit.memory.shortage import Device, Held, Shortage
from kit.phases import TRAINING
from kit.run.identity import identity
from kit.strategy import launch
from kit.strategy.accelerate_config import read_config
from kit.strategy.strategies import FSDP2, Strategy
from kit.tools.plan.models import SHAPES

CPU = Device("CPU", 80 * GIB, GIB, 78 * GIB)
GPU = Device("GPU 0", 80 * GIB, GIB, 78 * GIB)
LORA = Held(frozen=15 * GIB, trainable=GIB // 10, optimizer=GIB // 5, gradients_to_come=GIB // 10)
SAVED = Held(trainable=20 * GIB, to_save=60 * GIB)
FULL = Held(trainable=20 * GIB, optimizer=20 * GIB, gradients_to_come=20 * GIB, optimizer_to_come=20 * GIB)


def short(phase, held, device, asked=0, **more):
    return Shortage(phase, "", asked, device, held, rank=None, **{"trains_here": True, "is_saving": False} | more)


def flags(shortage, recipe, topology):
    return [change.text for change in setting_changes(shortage, recipe, topology)]


@pytest.mark.parametrize(
    ("changes", "phase", "held", "device", "num_processes", "expected"),
    [
        # On a GPU: the batch, then recomputation, then more GPUs; then what makes another run.
        ({}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp offload | qlora max_length_1024"),
        ({"gradient_checkpointing": True}, "", LORA, GPU, 1,
         "batch_size_2 inputs fsdp offload | qlora max_length_1024"),
        ({"gradient_checkpointing": True, "activation_offload": True}, "", LORA, GPU, 1,
         "batch_size_2 fsdp offload | qlora max_length_1024"),
        ({"per_device_train_batch_size": 1}, "", LORA, GPU, 1, "checkpointing fsdp offload | qlora max_length_1024"),
        ({"use_dora": True}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp offload | max_length_1024"),
        ({"method": "qlora"}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp offload | max_length_1024"),
        ({"attn_implementation": "eager"}, "", LORA, GPU, 1,
         "attn batch_size_2 checkpointing fsdp offload | qlora max_length_1024"),
        ({"attn_implementation": "sdpa", "packing": True}, "", LORA, GPU, 1,
         "attn batch_size_2 checkpointing fsdp offload | qlora max_length_1024"),
        ({"attn_implementation": "sdpa"}, "", LORA, GPU, 1,
         "batch_size_2 checkpointing fsdp offload | qlora max_length_1024"),
        # The global batch stays divisible: 24 over 2 processes is 12 each, of which 5 is no divisor.
        ({"per_device_train_batch_size": 12}, "", LORA, GPU, 2,
         "batch_size_6 checkpointing fsdp offload | qlora max_length_1024"),
        ({"per_device_train_batch_size": 6}, "", LORA, GPU, 4,
         "batch_size_3 checkpointing fsdp offload | qlora max_length_1024"),
        ({"global_batch_size": 10, "per_device_train_batch_size": 5}, "", LORA, GPU, 2,
         "batch_size_1 checkpointing fsdp offload | qlora max_length_1024"),
        # All weights: where the optimiser's state weighs, it can be smaller, or gone.
        ({"method": "full"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing fsdp offload | paged32 8bit bf16 lora max_length_1024"),
        # Shards take no bitsandbytes optimiser.
        ({"method": "full", "optim": "adamw_8bit"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing | paged lora max_length_1024"),
        ({"method": "full", "optim": "paged_adamw_8bit"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing | lora max_length_1024"),
        ({"method": "full", "optim": "paged_adamw_32bit"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing | paged bf16 lora max_length_1024"),
        ({"method": "full", "optim": "lion_32bit", "learning_rate": 1e-6}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing | lion lora max_length_1024"),
        # Sharded already: more GPUs, over which the 6 micro-batches of a step can be dealt, or the CPU's memory.
        ({"method": "full"}, "", Held(trainable=20 * GIB, optimizer=40 * GIB, sharded=True), GPU, 2,
         "batch_size_2 checkpointing num_processes_6 offload | bf16 lora max_length_1024"),
        ({"method": "full", "per_device_train_batch_size": 12}, "",
         Held(trainable=20 * GIB, optimizer=40 * GIB, sharded=True), GPU, 2,
         "batch_size_6 checkpointing offload | bf16 lora max_length_1024"),
        # Gradients of the whole model, kept from micro-batch to micro-batch.
        ({"method": "full", "sync_each_batch": False}, "", Held(trainable=GIB, gradients=30 * GIB, sharded=True),
         GPU, 2,
         "sync batch_size_2 checkpointing num_processes_6 offload | bf16 lora max_length_1024"),
        # What is waiting in CPU memory already is not in the way on the GPU.
        ({"method": "full"}, "", Held(sharded=True), GPU, 2, "batch_size_2 checkpointing | max_length_1024"),
        # Nothing but weights and state: activations are not to blame.
        ({"method": "full"}, "the optimiser's step", FULL, GPU, 1, "fsdp offload | paged32 8bit bf16 lora"),
        ({}, "loading", Held(), GPU, 1, "fsdp offload | qlora"),
        ({"method": "full"}, "loading", Held(), GPU, 1, "fsdp offload | lora"),
        ({}, "evaluation", LORA, GPU, 1, "eval_size_2 fsdp offload | qlora max_length_1024"),
        ({}, "generation", LORA, GPU, 1, "eval_size_2 new_tokens_64 generate fsdp offload | qlora max_length_1024"),
        # The reference before the first step: in batches of an evaluation, without gradients or state.
        ({"method": "full", "objective": "dpo"}, "the reference's forward passes",
         Held(trainable=20 * GIB, optimizer_to_come=40 * GIB), GPU, 1,
         "eval_size_2 fsdp offload | bf16 lora max_length_1024"),
        # A CPU: more processes take more of the same memory.
        ({}, "", Held(), CPU, 1, "batch_size_2 checkpointing | max_length_1024"),
        ({}, "", Held(), CPU, 2, "batch_size_2 checkpointing num_processes_1 | max_length_1024"),
        ({"method": "full"}, "", FULL, CPU, 1, "batch_size_2 checkpointing | 8bit bf16 lora max_length_1024"),
        ({"method": "full", "optim": "adamw_8bit"}, "", FULL, CPU, 1,
         "batch_size_2 checkpointing | lora max_length_1024"),
        # A save: its copies count only where they weigh, and not on a GPU.
        ({"method": "full"}, "saving", SAVED, CPU, 1, "async | bf16 lora"),
        ({"method": "full", "async_save": False}, "saving", SAVED, CPU, 1, "| bf16 lora"),
        ({}, "saving", Held(to_save=GIB), CPU, 1, ""),
        ({"method": "full"}, "saving", SAVED, GPU, 1, "fsdp offload | bf16 lora"),
        ({"method": "full"}, "writing the final model", SAVED, CPU, 1, "| bf16 lora"),
    ],
)  # fmt: skip
def test_only_what_applies_is_suggested_the_cheapest_first(changes, phase, held, device, num_processes, expected):
    written = {
        "async": "--async_save false",
        "sync": "--sync_each_batch true",
        "attn": "--attn_implementation auto",
        "checkpointing": "--gradient_checkpointing true",
        "inputs": "--activation_offload true",
        "fsdp": "--config fsdp",
        "offload": "--config fsdp_offload",
        "generate": "--predict_with_generate false",
        "8bit": "--optim adamw_8bit",
        "bf16": "--optim adamw_bf16",
        "paged": "--optim paged_adamw_8bit",
        "paged32": "--optim paged_adamw_32bit",
        "lion": "--optim lion_8bit",
        "lora": "--method lora",
        "qlora": "--method qlora",
        "batch_size": "--per_device_train_batch_size",
        "eval_size": "--per_device_eval_batch_size",
        "new_tokens": "--max_new_tokens",
        "max_length": "--max_length",
        "num_processes": "--num_processes",
    }
    words = [
        written[word] if word in written else f"{written[word.rpartition('_')[0]]} {word.rpartition('_')[2]}"
        for word in expected.replace("|", "").split()
    ]
    strategy = FSDP2 if held.sharded else None
    topology = placed(num_processes, strategy, "cpu" if device.is_cpu else "cuda")
    assert (
        flags(short(PHASE[phase or "training"], held, device, is_saving=phase == "saving"), make(**changes), topology)
        == words
    )


@pytest.mark.parametrize(("gib", "named"), [(40, ["selective", "true"]), (20, ["true"])])
def test_selective_checkpointing_is_named_first_where_it_is_enough(monkeypatch, gib, named):
    recipe = load_recipe("llama-8b-lora")
    changes = {"per_device_train_batch_size": 1, "gradient_checkpointing": False, "max_length": 4096}
    monkeypatch.setattr(advice, "find_shortage", lambda *_: short(TRAINING, LORA, GPU))
    monkeypatch.setattr(advice, "gpu_memory", lambda topology: gib * GIB)
    model = SimpleNamespace(config=LlamaConfig.from_pretrained(SHAPES / "llama-8b"), modules=lambda: ())
    topology = replace(placed(1, device_type="cuda"), mixed_precision="bf16")
    text = str(explain(RuntimeError(), model, None, recipe.model_copy(update=changes), topology))
    assert re.findall(r"--gradient_checkpointing (\w+)", text) == named


def test_what_a_gpu_computes_does_not_fill_the_memory_of_the_cpu():
    """A process that trains on a GPU reads, loads and saves in CPU memory."""
    text = message_of(MemoryError(), topology=placed(2, device_type="cuda"), per_device_train_batch_size=8)
    assert re.search(r"the rest +\S+ \S+  Python, libraries$", text, re.M)
    assert "-> a smaller model, or a device with more memory" in text
    on_cpu = message_of(MemoryError(), topology=placed(2), per_device_train_batch_size=8)
    assert re.search(r"the rest +\S+ \S+  activations, logits, buffers, Python, libraries$", on_cpu, re.M)
    assert "--per_device_train_batch_size 4" in on_cpu and "--num_processes 1" in on_cpu


def test_memory_of_other_processes_or_beyond_a_limit_costs_nothing():
    shared = Device("GPU 0", 80 * GIB, GIB, 40 * GIB, others=30 * GIB)
    assert flags(short(TRAINING, LORA, shared), make(), placed(device_type="cuda"))[0] == "nvidia-smi"
    limited = Device("CPU", 32 * GIB, 30 * GIB, GIB, limit=(GIB, "-v"))
    assert flags(short(TRAINING, Held(), limited), make(), placed())[0] == "ulimit -v unlimited"


@pytest.mark.parametrize(
    ("asked", "unused", "environment", "is_reported"),
    [
        (2 * GIB, 6 * GIB, {}, True),
        (7 * GIB, 6 * GIB, {}, False),  # it would not have been enough
        (0, 9 * GIB, {}, True),
        (0, 7 * GIB, {}, False),
        (2 * GIB, 6 * GIB, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        (2 * GIB, 6 * GIB, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, False),
    ],
)
def test_fragments_are_reported_where_they_would_have_been_enough(monkeypatch, asked, unused, environment, is_reported):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    device = Device("GPU 0", 80 * GIB, GIB, 70 * GIB, unused)
    found = flags(short(TRAINING, LORA, device, asked), make(), placed(device_type="cuda"))
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in found) == is_reported


def test_a_model_without_another_attention_keeps_eager(build):
    model, _ = build()
    assert "--attn_implementation auto" in message_of(RuntimeError(ON_CPU), model, attn_implementation="eager")
    model._supports_sdpa = False
    assert "--attn_implementation" not in message_of(RuntimeError(ON_CPU), model, attn_implementation="eager")


def test_a_command_that_trains_nothing_gets_no_setting_of_training(monkeypatch):
    """It has no step, no checkpoint and no run that could go on."""
    monkeypatch.setattr(memory, "components", lambda *_: FULL)
    monkeypatch.setattr(memory, "_device", lambda error: GPU)
    monkeypatch.setattr(memory, "_phase_and_module", lambda error: (PHASE["evaluation"], ""))
    topology = placed(device_type="cuda")
    training = str(explain(RuntimeError(ON_CPU), None, None, make(method="full"), topology))
    scoring = str(explain(RuntimeError(ON_CPU), None, None, make(method="full"), topology, trains=False))
    assert "--optim adamw_8bit" in training and "--method lora" in training and "last checkpoint" in training
    suggested = ["--per_device_eval_batch_size 2", "--config fsdp", "--config fsdp_offload", "--max_length 1024"]
    assert re.findall(r"^ +(--\w+ \S+)", scoring, re.M) == suggested
    assert "the same command with one of these; cheapest first" in scoring
    assert "checkpoint" not in scoring and "another run" not in scoring
    text = str(explain(RuntimeError(ON_CPU), None, None, make(method="lora"), topology, trains=False))
    assert "--method qlora" not in text  # nothing is frozen here
    monkeypatch.setattr(memory, "components", lambda *_: LORA)
    assert "--method qlora" in str(explain(MemoryError(), None, None, make(), topology, trains=False))


def changed_by(flag, recipe):
    """The recipe with a flag of the message, as the schema takes it; None for a flag of the launch."""
    name, value = flag.removeprefix("--").split()
    return Recipe(**recipe.model_dump() | {name: value}) if name in Recipe.model_fields else None


@pytest.mark.parametrize("error", [RuntimeError(ON_CPU), torch.OutOfMemoryError(ON_GPU)], ids=["cpu", "gpu"])
def test_a_run_continues_with_the_first_group_of_settings_only(error, monkeypatch):
    """As the output folder decides it."""
    monkeypatch.setattr(memory, "components", lambda *_: Held(1, 1, 1, 1, 1, 1))
    monkeypatch.setattr(advice, "_SMALL", 0.0)
    topology = placed(device_type="cpu" if "CPU" in str(error) else "cuda")
    seen = set()
    for phase in ("the forward pass", "generation"):
        monkeypatch.setattr(memory, "_phase_and_module", lambda error, phase=phase: (PHASE[phase], ""))
        recipe = make(method="full", attn_implementation="eager", eval_split_size=2, predict_with_generate=True)
        text = str(explain(error, None, None, recipe, topology))
        same, other = text.split("-> these make it another run")
        for is_other, part in enumerate((same, other)):
            for flag in re.findall(r"^ +(--\w+ \S+)", part, re.M):
                if changed := changed_by(flag, recipe):
                    seen.add(flag.split()[0])
                    assert (identity(changed, "x", "base") != identity(recipe, "x", "base")) == is_other, flag
    assert {"--per_device_train_batch_size", "--gradient_checkpointing", "--optim", "--method", "--max_length"} <= seen
    assert {"--attn_implementation", "--max_new_tokens", "--predict_with_generate"} <= seen


@pytest.mark.slow
def test_every_message_is_short_and_every_suggestion_is_allowed(monkeypatch):
    crowded = Device("GPU 0", 80 * GIB, GIB, 70 * GIB, unused=9 * GIB, others=9 * GIB)
    limited = Device("CPU", 32 * GIB, GIB, 31 * GIB, limit=(GIB, "-d"))
    gpus, cpus = {"device_type": "cuda"}, {"device_type": "cpu"}
    places = [
        (crowded, placed(1, **gpus)),
        (crowded, placed(2, **gpus)),
        (crowded, placed(2, FSDP2, **gpus)),
        (crowded, placed(2, Strategy("fsdp1", offloads=True), **gpus)),
        (limited, placed(1, **cpus)),
        (limited, placed(2, **cpus)),
        (limited, placed(2, FSDP2, **cpus)),
        (limited, placed(2, FSDP2, **gpus)),
    ]
    monkeypatch.setattr(advice, "_SMALL", 0.0)
    monkeypatch.setattr(memory, "_calls", lambda frame: [memory._IN_BACKGROUND])
    methods, optims = ("full", "lora", "qlora"), ("adamw_torch", "adamw_8bit", "paged_adamw_8bit")
    launches = set()
    for (device, topology), phase, method, optim, packing in product(
        places, PHASE.values(), methods, optims, (False, True)
    ):
        more = {"eval_split_size": 2, "predict_with_generate": True, "attn_implementation": "eager"}
        recipe = make(method=method, optim=optim, packing=packing, **more)
        if launch._method_problems(recipe, recipe.optim, topology.strategy):
            continue
        is_sharded = topology.strategy.shards
        held = Held(*[GIB] * 6, gathered=is_sharded * GIB, to_save=GIB, sharded=is_sharded)
        monkeypatch.setattr(memory, "_device", lambda error, device=device: device)
        monkeypatch.setattr(memory, "components", lambda *_, held=held: held)
        monkeypatch.setattr(memory, "_phase_and_module", lambda error, phase=phase: (phase, "LlamaDecoderLayer"))
        text = str(explain(RuntimeError(ON_CPU), None, None, recipe, topology))
        lines = text.splitlines()
        assert len(lines) <= 23 and max(map(len, lines)) <= 125, text
        for flag in re.findall(r"^ +(--\w+ \S+)", text, re.M):
            if changed := changed_by(flag, recipe):
                assert not find_conflicts(changed), flag
                assert not launch._method_problems(changed, changed.optim, topology.strategy), flag
                assert not launch._batch_problems(changed, topology.num_processes), flag
                assert changed != recipe, flag
                continue
            launches.add(flag)
            name, value = flag.removeprefix("--").split()
            if name == "config":
                assert value != topology.strategy.config, flag
                assert not (topology.strategy.offloads and value == "fsdp_offload"), flag
                assert not launch._method_problems(
                    recipe, recipe.optim, read_config(ACCELERATE_CONFIGS / f"{value}.yaml").strategy
                )
            else:
                assert not launch._batch_problems(recipe, int(value)), flag
    assert launches == {"--config fsdp", "--config fsdp_offload", "--num_processes 6", "--num_processes 1"}


def test_a_smaller_max_length_says_what_happens_to_longer_samples():
    for strategy in get_args(DataSettings.model_fields["excess_length_strategy"].annotation):
        recipe = make(excess_length_strategy=strategy)
        changes = setting_changes(short(TRAINING, LORA, GPU), recipe, placed(device_type="cuda"))
        (cost,) = (change.cost for change in changes if change.key == "max_length")
        assert cost.startswith("longer samples, which "), strategy
