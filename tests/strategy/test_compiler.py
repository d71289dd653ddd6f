"""torch_compile on each device and strategy, and the refusals."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from preflight_helpers import ONE_PROCESS

from kit.config.command_line import read_recipe
from kit.preflight import preflight
from kit.strategy import compiler
from kit.strategy.compiler import compile_problems, why_not_by_default
from kit.strategy.strategies import FSDP1, FSDP2, SINGLE
from kit.strategy.topology import Topology

CPU = "off (it was measured on NVIDIA GPUs only, not on cpu)"


def on(device_type, strategy=SINGLE):
    return Topology(strategy=strategy, config_name="x", num_processes=1, mixed_precision="no", device_type=device_type)


def fake_gpu(monkeypatch, name, *capability):
    major, minor = capability
    gpu = SimpleNamespace(total_memory=16 * 2**30, name=name, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)


def test_the_default_command_compiles_on_ampere_only_and_says_why(monkeypatch, tmp_path):
    recipe = read_recipe([]).model_copy(update={"output_dir": str(tmp_path / "out")})
    of_gpu = {"device_type": "cuda", "cpu_dry_run": False}
    for name, capability, changes, said, compiles in (
        ("", (0, 0), {}, CPU, False),
        ("NVIDIA A100", (8, 0), {**of_gpu, "mixed_precision": "bf16"}, "on", "auto"),
        ("Tesla T4", (7, 5), {**of_gpu, "mixed_precision": "fp16"}, "off (Tesla T4 is older than Ampere)", False),
    ):
        fake_gpu(monkeypatch, name, *capability)
        checked = preflight.check(recipe, replace(ONE_PROCESS, **changes), "tiny")
        assert f"torch_compile auto: {said}" in checked.notes
        assert checked.recipe.torch_compile == compiles and checked.recipe.gradient_checkpointing is False
        assert checked.workload.fuses == bool(compiles)


def test_auto_leaves_out_what_is_known_not_to_gain(monkeypatch, recipe):
    fake_gpu(monkeypatch, "NVIDIA A100", 8, 0)
    gpu = replace(on("cuda"), mixed_precision="bf16")
    for settings, topology, num_steps, why in (
        ({}, gpu, 47, ""),
        ({}, gpu, 46, "1,472 samples per GPU"),
        ({}, gpu, 0, ""),  # not known: another check failed
        ({}, on("cuda", FSDP1), 47, "FSDP1"),
        ({"method": "qlora"}, replace(gpu, strategy=FSDP2), 47, "4-bit layers under FSDP2"),
        ({"packing": True}, on("cuda"), 47, "packs in float32"),
        ({"packing": True}, gpu, 47, ""),
        ({"qat": "int4_weight_only"}, gpu, 47, "with qat or tiled_mlp"),
        ({"tiled_mlp": True, "gradient_checkpointing": True}, gpu, 47, "with qat or tiled_mlp"),
    ):
        found = why_not_by_default(recipe(**settings), topology, num_steps)
        assert why in found and bool(found) == bool(why), (settings, found)


def test_unsupported_compiling_is_named_with_a_fix(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    for device_type, strategy, words in (
        ("cuda", SINGLE, "needs triton"),
        ("mps", SINGLE, "on MPS"),
        ("cuda", FSDP1, "with FSDP1"),
    ):
        (problem,) = compile_problems(on(device_type, strategy))
        assert problem.where == "torch_compile" and words in problem.found
        assert problem.fix.endswith("or --torch_compile false")
