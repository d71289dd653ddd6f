"""The formulas agree with the kit's own step on fake tensors, and with what other kits published."""

import json
import runpy
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.config.recipe import Recipe
from kit.memory.families import shape_of
from kit.memory.formulas import predict
from kit.memory.operations import operations_per_token
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP2, OFFLOAD, SINGLE
from kit.tools.plan.models import find_shape

GIB = 2**30
# GiB of tensors at the peak of a step of 1 and of 3 micro-batches, by
# benchmarks.simulation.simulate.simulate(workload)
SIMULATED = [
    ("llama-1b", "full", SINGLE, 1, 2048, 1, 20.37, 21.35),
    ("llama-8b", "full", FSDP2, 8, 4096, 1, 17.968, 20.432),
    ("llama-8b", "full", FSDP2, 64, 4096, 1, 6.88, 7.34),
    ("llama-8b", "full", OFFLOAD, 8, 4096, 1, 5.47, 5.48),
    ("llama-8b", "lora", SINGLE, 1, 4096, 1, 17.386, 17.541),
    ("qwen2.5-0.5b", "full", FSDP2, 8, 2048, 1, 1.952, 2.182),
    ("qwen3-0.6b", "lora", SINGLE, 1, 1024, 4, 1.734, 1.771),
    ("gemma-3-1b", "lora", SINGLE, 1, 2048, 1, 2.403, 2.460),
    ("olmo-2-1b", "full", SINGLE, 1, 2048, 1, 22.14, 23.65),
    ("llama-1b", "lora", OFFLOAD, 8, 2048, 1, 1.216, 1.216),
    ("gemma-2-2b", "lora", SINGLE, 1, 2048, 1, 6.079, 6.156),  # eager attention
    ("gemma-2-2b", "full", FSDP2, 8, 2048, 1, 9.280, 9.707),
]


def workload(shape, method, strategy=SINGLE, num_gpus=1, length=2048, rows=1, **fields):
    shape = find_shape(shape)
    fields = {"gradient_checkpointing": True, "eager": shape.eager} | fields
    return Workload(
        shape=shape, method=method, strategy=strategy, num_gpus=num_gpus, length=length, rows=rows, **fields
    )


def test_the_peak_is_that_of_the_simulation():
    for row in SIMULATED:
        *case, one, three = row
        for micro_batches, simulated in ((1, one), (3, three)):
            planned = predict(workload(*case, micro_batches=micro_batches)).tensors / GIB
            assert planned == pytest.approx(simulated, rel=0.02), row  # 5 % are promised


def test_gpus_that_share_rows_hold_a_part_of_them():
    """By the same simulation, of two micro-batches on eight GPUs: four share each row, or all."""
    for method, length, size, how, simulated in (
        ("lora", 4096, 4, False, 2.78),
        ("lora", 16384, 4, True, 1.82),
        ("full", 16384, 8, False, 7.92),
    ):
        planned = predict(
            workload(
                "llama-1b",
                method,
                FSDP2,
                8,
                length,
                micro_batches=2,
                gradient_checkpointing=how,
                sequence_parallel_size=size,
            )
        )
        assert planned.tensors / GIB == pytest.approx(simulated, rel=0.02), (method, length)


def test_a_teacher_takes_what_the_simulation_shows():
    """MiB of a step of 2 micro-batches, by benchmarks/plan_formulas.py; of a stored teacher, in its own pass."""
    llama = {"objective": "distil", "teacher": find_shape("llama-8b"), "logit_bytes": 30, "micro_batches": 2}
    for fields, measured in (
        ({"method": "full"}, 37191),
        ({"method": "lora", "strategy": FSDP2, "num_gpus": 8}, 5686),
        ({"method": "lora", "teacher_in_4bit": True}, 9134),
        ({"method": "lora", "strategy": DDP, "num_gpus": 8}, 19027),
    ):
        assert predict(workload("llama-1b", **llama | fields)).tensors / 2**20 == pytest.approx(measured, rel=0.01)
    shared = {"method": "lora", "strategy": FSDP2, "num_gpus": 8, "length": 65536, "rows": 1}
    whole, part = (
        predict(workload("llama-1b", **llama | shared | {"sequence_parallel_size": n})).components["teacher"]
        for n in (1, 8)
    )
    assert part == whole  # of the states of all targets, which each GPU has
    for fields, measured in (({}, 15716), ({"strategy": FSDP2, "num_gpus": 8}, 5370)):
        stored = workload("qwen2.5-0.5b", "lora", **llama | {"teacher_top_k": 64} | fields)
        memory = predict(stored)
        assert memory.moment == "teacher's pass" and memory.tensors / 2**20 == pytest.approx(measured, rel=0.02)
        step = predict(replace(stored, teacher=None))
        assert step.tensors < memory.tensors and operations_per_token(stored) == operations_per_token(
            replace(stored, teacher=None)
        )


def test_a_tower_takes_what_the_simulation_shows():
    """GiB of tensors of steps of two micro-batches, with a picture of 1,280 tokens in each row of 2,048."""
    every_part = {"trained_parts": ("vision", "projector", "language")}
    for shape, method, fields, simulated in (
        ("qwen2.5-vl-7b", "qlora", {}, 7.12),
        ("qwen2.5-vl-3b", "lora", {"gradient_checkpointing": False}, 16.17),
        ("qwen2.5-vl-3b", "full", every_part, 59.54),
        ("qwen2.5-vl-3b", "full", every_part | {"gradient_checkpointing": False}, 78.06),
    ):
        planned = predict(workload(shape, method, micro_batches=2, image_tokens=1280, **fields)).tensors / GIB
        assert planned == pytest.approx(simulated, rel=0.02), (shape, method, fields)


def test_a_rollout_takes_what_was_measured():
    """On a CPU in float32, by benchmarks/simulation/meter.py: MB of tensors while rows of prompts are answered."""
    tiny = json.loads((ROOT / "recipes/tiny/model/config.json").read_text())
    for method, layers, hidden, rows, prompt, new, measured in (
        ("lora", 2, 128, 8, 108, 16, 9.971),
        ("full", 3, 64, 16, 83, 12, 8.464),
    ):
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 32}
        heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
        asked = {"generated_rows": rows, "new_tokens": new, "objective": "grpo", "rows": 2, "micro_batches": rows // 2}
        planned = predict(
            Workload(
                shape=shape_of(tiny | sizes | heads, "random"),
                method=method,
                length=prompt + new,
                gradient_checkpointing=True,
                bf16=False,
                **asked,
            )
        )
        assert planned.moment == "generation" and planned.tensors / 1e6 == pytest.approx(measured, rel=0.03)


def test_inputs_of_layers_on_the_host_take_nothing_of_the_gpu():
    cases = [
        ("llama-8b", "lora", SINGLE, 2, True, 17.386, 16.564),
        ("llama-8b", "lora", SINGLE, 2, "selective", 28.541, 27.573),
        ("llama-8b", "full", FSDP2, 2, True, 17.968, 17.936),
        ("llama-1b", "lora", FSDP2, 16, True, None, 5.354),
    ]
    for case in cases:
        shape, method, strategy, rows, how, without, simulated = case
        num_gpus = 8 if strategy.shards else 1
        offloaded = workload(
            shape, method, strategy, num_gpus, 2048, rows, gradient_checkpointing=how, activation_offload=True
        )
        assert predict(offloaded).tensors / GIB == pytest.approx(simulated, rel=0.025), case
        if without:
            plain = predict(replace(offloaded, activation_offload=False)).tensors / GIB
            assert plain == pytest.approx(without, rel=0.02), case


def test_tiles_of_a_long_row_take_what_the_simulation_shows():
    cases = [
        ("llama-8b", "lora", SINGLE, 8192, False, 18.532),
        ("llama-8b", "lora", SINGLE, 65536, True, 20.503),
        ("llama-8b", "qlora", SINGLE, 32768, True, 8.708),
        ("llama-1b", "full", SINGLE, 32768, True, 20.401),
        ("llama-1b", "full", FSDP2, 32768, True, 5.084),
        ("qwen3-8b", "lora", SINGLE, 32768, True, 19.797),
    ]
    for case in cases:
        shape, method, strategy, length, offloads, simulated = case
        more = {"tiled_mlp": True, "activation_offload": offloads, "device_memory": 24 * GIB}
        planned = predict(workload(shape, method, strategy, 8 if strategy.shards else 1, length, **more))
        assert planned.tensors / GIB == pytest.approx(simulated, rel=0.01), case


def test_a_loss_that_autograd_differentiates_holds_more_of_each_logit():
    """Simulated with a frozen head and chunks of 768 positions, as a GPU of 48 GiB has."""
    cases = [
        ({}, 3_566_464_112),
        ({"label_smoothing_factor": 0.1}, 3_954_172_040),
        ({"objective": "eaft"}, 3_954_168_968),
        ({"z_loss_coef": 1e-4}, 4_742_188_172),
    ]
    for settings, simulated in cases:
        recipe = Recipe(model_name_or_path="m", dataset="d", max_length=2048, gradient_checkpointing=True, **settings)
        planned = predict(replace(Workload.of(recipe, find_shape("llama-1b")), device_memory=48 * GIB, micro_batches=1))
        assert planned.tensors == pytest.approx(simulated, rel=0.01), (settings, simulated)


def test_adamw_torch_holds_the_roots_of_all_second_moments_for_a_moment():
    """Simulated on fake GPUs with ``foreach``: 24,716,021,052 bytes."""
    memory = predict(workload("llama-1b", "full", length=64, optim="adamw_torch"))
    assert memory.moment == "optimiser step" and memory.tensors == pytest.approx(24_716_021_052, rel=1e-3)
    assert predict(workload("llama-1b", "full", length=64)).tensors < 0.9 * memory.tensors


def test_the_formulas_agree_with_what_other_kits_published():
    rows = runpy.run_path(str(ROOT / "benchmarks/plan_accuracy.py"))["ROWS"]
    compared = [row for row in rows if row.gib]
    assert len(compared) >= 18
    for row in compared:
        error = abs(predict(row.workload).tensors / GIB / row.gib - 1)
        assert (error > 0.1) == bool(row.memory_off), row.name  # a miss has a reason, and a reason is of a miss
    assert sum(bool(row.memory_off) for row in compared) <= 6
