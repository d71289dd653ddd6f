"""A kernel that was asked for is used, or the run ends with the reason. The GPUs are torch's answers about them."""

import sys
from types import ModuleType

import pytest
import torch
from helpers import with_gpus
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from kit.errors import UserError
from kit.model.attention import use_flash_attention_3
from kit.strategy import kernels
from kit.strategy.kernels import check_kernels
from kit.strategy.strategies import FSDP2, SINGLE
from kit.strategy.topology import Topology


def topology_of(precision="bf16", device="cuda", num_processes=1, strategy=SINGLE):
    return Topology(
        strategy=strategy,
        config_name=strategy.config,
        num_processes=num_processes,
        mixed_precision=precision,
        device_type=device,
    )


@pytest.fixture
def package(monkeypatch):
    """The module of FlashAttention 3 with its operators, which compute nothing here."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        library.define(f"{name}() -> ()")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    yield
    restore_flash_attention_impl(_raise_warn=False)
    library._destroy()


def test_flash_attention_3_is_refused_where_it_cannot_run(recipe, monkeypatch):
    asked = recipe(attn_implementation="flash_attention_3", packing=True)
    with_gpus(monkeypatch, ("H100", 9))
    (problem,) = check_kernels(asked, topology_of())
    assert "package is not installed" in problem.found and problem.fix == "--attn_implementation auto"
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    for device, precision, majors, reason in [
        ("cuda", "bf16", [9, 8], "there is GPU of 8"),
        ("cuda", "no", [9], "needs mixed_precision: bf16"),
        ("cpu", "bf16", [], "the run is on cpu"),
    ]:
        with_gpus(monkeypatch, *((f"GPU of {major}", major) for major in majors))
        problems = check_kernels(asked, topology_of(precision, device, num_processes=2))
        assert bool(problems) == bool(reason) and all(reason in problem.found for problem in problems), reason
    assert check_kernels(recipe(), topology_of()) == []


def test_it_takes_the_place_of_the_kernel_in_torch(package):
    use_flash_attention_3()
    assert current_flash_attention_impl() == "FA3"


def test_a_package_without_its_kernels_ends_the_run_with_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(UserError, match="installed but broken"):
        use_flash_attention_3()
    assert current_flash_attention_impl() is None


def test_products_of_8_bits_are_refused_where_they_cannot_be(recipe, monkeypatch):
    for gpu, changes, reason in [
        (("RTX 4090", 8, 9), {"strategy": FSDP2}, ""),
        (("A100", 8, 0), {}, "compute capability 8.9 or above, and A100 has 8.0"),
        (("H100", 9, 0), {"precision": "no"}, "needs mixed_precision: bf16"),
        (None, {"device": "mps"}, "the run is on mps"),
        (None, {"device": "cpu"}, ""),  # rehearses
    ]:
        with_gpus(monkeypatch, *([gpu] if gpu else []))
        problems = check_kernels(recipe(fp8=True), topology_of(**changes))
        assert bool(problems) == bool(reason) and all(reason in problem.found for problem in problems), reason
