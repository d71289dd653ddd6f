"""Devices are tried, not asked: a product that is wrong fails, and a GPU that is missing or small is reported."""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import with_gpus

from kit.errors import Problem
from kit.memory.needs import RunNeeds
from kit.tools.doctor import devices
from kit.tools.doctor.devices import check_attention, check_bf16, check_driver, check_four_bit, check_gpus

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch):
    """Sets the memory of the GPUs of this machine, in GiB."""

    def gpus(*sizes, names=("H100",)):
        properties = [SimpleNamespace(name=names[i % len(names)], total_memory=n * GIB) for i, n in enumerate(sizes)]
        module = SimpleNamespace(get_device_properties=properties.__getitem__)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)

    return gpus


def needs(gibibytes):
    return RunNeeds(loading=0, host=0, device=int(gibibytes * GIB), checkpoint=0, num_checkpoints=1, final=0)


@pytest.mark.parametrize(("gibibytes", "status"), [(30, "ok"), (70, "warn"), (90, "fail")])
def test_gpus_must_hold_weights_gradients_and_optimiser(gibibytes, status, gpus, topology):
    gpus(80, 80)
    result = check_gpus(topology(device_type="cuda", rehearsal=False), needs(gibibytes), 2)
    assert result.status == status
    assert f"2 x H100 of 80.00 GiB; weights, gradients and optimiser take {gibibytes}.00 GiB" in result.found
    assert status == "ok" or "--config fsdp" in result.fix


def test_what_the_plan_refuses_fails_although_the_weights_fit(gpus, topology):
    gpus(80, 80)
    refused = [Problem("memory", "the run needs about 90.0 GiB of each GPU", fix="--gradient_checkpointing true")]
    result = check_gpus(topology(device_type="cuda", rehearsal=False), needs(30), 2, refused)
    assert result.status == "fail" and "90.0 GiB" in result.found and "checkpointing" in result.fix


def test_gpus_that_differ_are_a_warning(gpus, topology):
    gpus(80, 40)
    assert check_gpus(topology(device_type="cuda"), None, 2).status == "warn"
    gpus(80, 80, names=("H100", "A100"))
    assert "H100/A100" in check_gpus(topology(device_type="cuda"), None, 2).found


def test_a_config_for_gpus_on_a_machine_without_is_a_rehearsal(topology):
    assert check_gpus(topology(), None, 2).status == "warn"
    assert check_gpus(topology(rehearsal=False), None, 1).status == "ok"


def test_a_driver_that_torch_cannot_use_is_reported_with_torchs_words(topology, monkeypatch, tmp_path):
    assert check_driver(topology()).status == "ok"
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    monkeypatch.setattr(devices, "_NVIDIA", str(driver))

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = check_driver(topology())
    assert result.status == "fail" and "driver 535.104.05: The NVIDIA driver on your system is too old" in result.found
    assert "nvidia-smi" in result.fix


def test_bf16_is_tried_if_the_config_asks_for_it(topology, monkeypatch):
    assert check_bf16(topology(), "ddp", "lora").status == "ok"
    assert "not asked for" in check_bf16(topology(mixed_precision="no"), None, "lora").found
    monkeypatch.setattr(devices, "_error", lambda result, expected: 0.5)
    assert check_bf16(topology(), "ddp", "lora").status == "fail"
    with_gpus(monkeypatch, ("T4", 7))
    result = check_bf16(topology(device_type="cuda"), "ddp", "lora")
    assert result.status == "fail" and "bf16, which T4 does not have" in result.found and result.fix
    result = check_bf16(topology(device_type="cuda", mixed_precision="no"), None, "lora")
    assert result.status == "warn" and "T4 has no bf16" in result.found


@pytest.mark.parametrize(
    ("settings", "status"), [({}, "warn"), ({"method": "qlora"}, "fail"), ({"optim": "adamw_8bit"}, "fail")]
)
def test_a_broken_bitsandbytes_fails_only_a_run_that_needs_it(settings, status, recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    recipe = recipe.model_copy(update=settings)
    result = check_four_bit(recipe.method, recipe.optim, "cpu")
    assert result.status == status and "bitsandbytes is installed but broken" in result.found
    assert "python -m bitsandbytes" in result.fix


def test_a_4_bit_product_that_is_far_off_fails(recipe, monkeypatch):
    result = check_four_bit("qlora", recipe.optim, "cpu")
    assert result.status == "ok" and "off float32" in result.found
    monkeypatch.setattr("bitsandbytes.matmul_4bit", lambda inputs, weight, quant_state: torch.zeros(8, 64))
    assert check_four_bit("qlora", recipe.optim, "cpu").status == "fail"


def test_a_run_without_bitsandbytes_needs_none(recipe, monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert check_four_bit(recipe.method, recipe.optim, "cpu").status == "ok"


@pytest.fixture(scope="module")
def config():
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=64, num_attention_heads=8)


def test_backends_of_attention_are_tried_and_the_runs_own_is_named(recipe, config, topology):
    result = check_attention(recipe, False, config, topology())
    assert result.status == "ok" and result.found.endswith("the run takes sdpa")
    assert "sdpa math" in result.found and "varlen" not in result.found  # which has no kernel for a CPU
    packed = recipe.model_copy(update={"packing": True})
    assert check_attention(packed, True, config, topology()).found.endswith("varlen by a loop over the samples")
    assert check_attention(recipe, False, None, topology()).status == "ok"


def test_a_backend_that_the_recipe_asks_for_must_run(recipe, config, topology):
    asked = recipe.model_copy(update={"attn_implementation": "flash_attention_2"})
    result = check_attention(asked, False, config, topology())
    assert result.status == "fail" and result.found.startswith("flash_attn package does not run here")
