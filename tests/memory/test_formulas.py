"""The formulas agree with the kit's own step on fake tensors, and with what other kits published."""

import json
import runpy
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.config.recipe import Recipe
from kit.memory.families import shape_of
from kit.memory.formulas import EXPERTS_TOGETHER, predict
from kit.memory.workload import Workload
from kit.model.experts.packed import MAX_BYTES
from kit.strategy.strategies import FSDP2, OFFLOAD, SINGLE
from kit.tools.plan.models import find_shape

GIB = 2**30
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# GiB of tensors at the peak of a step of 1 and of 3 micro-batches, by
# benchmarks.simulation.simulate.simulate(workload)
SIMULATED = [
    ("llama-1b", "full", SINGLE, 1, 2048, 1, 20.37, 21.35),
    ("llama-8b", "full", FSDP2, 8, 4096, 1, 17.968, 20.432),
    ("llama-8b", "full", OFFLOAD, 8, 4096, 1, 5.47, 5.48),
    ("llama-8b", "lora", SINGLE, 1, 4096, 1, 17.386, 17.541),
    ("qwen2.5-0.5b", "full", FSDP2, 8, 2048, 1, 1.952, 2.182),
    ("gemma-3-1b", "lora", SINGLE, 1, 2048, 1, 2.403, 2.460),
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


def test_what_saves_memory_saves_what_the_simulation_shows():
    """Others: benchmarks/plan_formulas.py, which runs before a release."""
    eight = {"strategy": FSDP2, "num_gpus": 8}
    shared = eight | {"micro_batches": 2, "sequence_parallel_size": 4}
    offloaded = {"length": 2048, "rows": 2, "activation_offload": True}
    tiled = {"tiled_mlp": True, "device_memory": 24 * GIB}
    for shape, method, fields, simulated in (
        ("llama-1b", "lora", shared | {"length": 4096, "gradient_checkpointing": False}, 2.78),
        ("llama-8b", "lora", offloaded, 16.564),
        ("llama-8b", "lora", offloaded | {"gradient_checkpointing": "selective"}, 27.573),
        ("llama-1b", "full", tiled | eight | {"length": 32768, "activation_offload": True}, 5.084),
    ):
        planned = predict(workload(shape, method, **fields)).tensors / GIB
        assert planned == pytest.approx(simulated, rel=0.025), (shape, method, fields)


def test_an_encoder_that_trains_takes_what_the_simulation_shows():
    """Four layers of text, 2,048 tokens, 1,536 of them of an image (benchmarks/plan_media.py)."""
    parts = {"image_tokens": 1536, "trained_parts": ("vision", "projector", "language")}
    for name, simulated in (("qwen3-vl-4b", 23.51), ("gemma-3-4b", 48.57), ("ministral-3-3b", 29.05)):
        shape = replace(find_shape(name), num_layers=4)
        planned = predict(Workload(shape=shape, method="full", length=2048, **parts)).tensors / GIB
        assert planned == pytest.approx(simulated, rel=0.03), name


def test_experts_take_what_the_simulation_shows():
    """Four layers of each, with 8,192 tokens. Fused experts are most of the weights, and FSDP gathers whole layers."""
    eight, on_all = {"strategy": FSDP2, "num_gpus": 8}, {"gradient_checkpointing": False}
    adapted = {"lora_targets": (*ATTENTION, "experts.gate_up_proj", "experts.down_proj")}
    for shape, method, length, fields, simulated in (
        ("qwen3-30b-a3b", "full", 2048, eight, 10.829),
        ("qwen3-30b-a3b", "full", 2048, eight | on_all | {"micro_batches": 1}, 10.670),
        ("qwen3-30b-a3b", "lora", 4096, eight | on_all, 5.544),
        ("qwen3-30b-a3b", "lora", 4096, {"gradient_checkpointing": "selective"}, 6.618),
        ("qwen3-30b-a3b", "lora", 4096, adapted, 6.553),
        ("qwen3-30b-a3b", "qlora", 2048, {}, 1.690),
        ("qwen3-30b-a3b", "qlora", 4096, on_all, 3.520),
        ("qwen3-30b-a3b", "qlora", 8192, adapted, 4.141),
        ("qwen3-30b-a3b", "qlora", 4096, adapted | eight, 1.997),
        ("gpt-oss-20b", "full", 1024, eight, 14.313),
        ("gpt-oss-20b", "lora", 2048, on_all, 10.625),
        ("gpt-oss-20b", "qlora", 2048, {}, 3.395),
    ):
        of = workload(shape, method, length=length, **{"micro_batches": 2, "device_memory": 24 * GIB} | fields)
        planned = predict(replace(of, shape=replace(of.shape, num_layers=4, vocab_size=8192))).tensors / GIB
        assert planned == pytest.approx(simulated, rel=0.02), (shape, method, fields)


def test_experts_in_4_bits_take_half_a_byte_and_few_are_plain_at_a_time():
    """Qwen3 30B-A3B has 29.0B weights in experts, 19.1B of gpt-oss 20B have the MXFP4 of its files."""
    base = workload("qwen3-30b-a3b", "lora", length=512)
    base = replace(base, shape=replace(base.shape, vocab_size=8192))  # else the peak is in the loss head
    plain, packed = (predict(replace(base, method=method)).components for method in ("lora", "qlora"))
    of_experts, of_attention = 48 * 128 * 3 * 2048 * 768, 48 * 2 * 2048 * (4096 + 512)
    nf4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)
    assert packed["4-bit weights"] == pytest.approx((of_experts + of_attention) * nf4, abs=1)
    assert plain["frozen weights"] - packed["frozen weights"] == 2 * (of_experts + of_attention)
    assert packed["dequantised weights"] == EXPERTS_TOGETHER == MAX_BYTES  # a layer's experts are 1,152 MiB
    gpt = predict(workload("gpt-oss-20b", "qlora"))
    of_experts, of_attention = 24 * 32 * 3 * 2880**2, 24 * 2 * 2880 * (4096 + 512)
    in_4_bits = of_experts * 17 / 32 + of_attention * nf4
    assert gpt.components["4-bit weights"] == pytest.approx(in_4_bits, abs=1)
    others = 20_914_757_184 - of_experts  # what the files hold in bf16
    assert gpt.disk["base model's own files"] == pytest.approx(of_experts * 17 / 32 + 2 * others, abs=1)


def test_adapters_on_experts_are_of_all_and_what_they_keep_of_those_that_a_token_reaches():
    names = (*ATTENTION, "experts.gate_up_proj", "experts.down_proj")
    adapted = workload("qwen3-30b-a3b", "qlora", lora_r=4, lora_targets=names, rows=2)
    without = replace(adapted, lora_targets=ATTENTION)
    assert adapted.adapter_parameters - without.adapter_parameters == 48 * 128 * 4 * (2048 + 2 * 768 + 768 + 2048)
    assert adapted.adapter_of_token - without.adapter_of_token == 48 * 8 * 4 * (2048 + 2 * 768 + 768 + 2048)
    # In the backward pass of a layer: sorted copies of both inputs, and the results of both first factors.
    dropped = predict(replace(adapted, lora_dropout=True)).components["activations"]
    kept = predict(adapted).components["activations"]
    assert kept - predict(without).components["activations"] > 2 * adapted.tokens * 8 * (2048 + 768 + 4 + 4)
    assert dropped > kept + adapted.tokens * 8 * (2048 + 768)


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
                mixed_precision="no",
                **asked,
            )
        )
        assert planned.moment == "generation" and planned.tensors / 1e6 == pytest.approx(measured, rel=0.03)


def test_a_loss_that_autograd_differentiates_holds_more_of_each_logit():
    """Simulated with a frozen head and chunks of 768 positions, as a GPU of 48 GiB has."""
    cases = [
        ({}, 3_566_464_112),
        ({"label_smoothing_factor": 0.1}, 3_954_172_040),
        ({"objective": "eaft"}, 3_954_168_968),
        ({"z_loss_coef": 1e-4}, 4_742_188_172),
    ]
    for settings, simulated in cases:
        own = {"max_length": 2048, "gradient_checkpointing": True, "torch_compile": False, **settings}
        recipe = Recipe(model_name_or_path="m", dataset="d", **own)
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
