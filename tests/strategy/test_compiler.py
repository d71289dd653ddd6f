"""What ``torch_compile`` means on a machine, and what is refused there."""

import pytest

from kit.strategy import compiler
from kit.strategy.compiler import compile_problems, resolve_compile
from kit.strategy.strategies import SINGLE, Strategy
from kit.strategy.topology import Topology


def on(device_type, strategy=SINGLE):
    return Topology(strategy=strategy, config_name="x", num_processes=1, mixed_precision="no", device_type=device_type)


@pytest.fixture
def complete(monkeypatch):
    """A machine with everything that compiling needs."""
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)


def test_the_recipe_decides_before_the_config_and_auto_is_for_cuda(complete, recipe):
    for asked, config_asks, device_type, compiles in [
        ({}, True, "cpu", True),
        ({"torch_compile": False}, True, "cuda", False),
        ({"torch_compile": "auto"}, False, "cuda", True),
        ({"torch_compile": "auto"}, False, "cpu", False),
    ]:
        found, said = resolve_compile(recipe(**asked), config_asks, on(device_type))
        assert found is compiles and bool(said) == (asked.get("torch_compile") == "auto" and not compiles), asked


@pytest.mark.parametrize(("device_type", "words"), [("cuda", "needs triton"), ("mps", "on MPS")])
def test_what_a_machine_lacks_is_named_with_a_way_out(monkeypatch, device_type, words):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    (problem,) = compile_problems(on(device_type))
    assert problem.where == "torch_compile" and words in problem.found
    assert problem.fix.endswith("or --torch_compile false")


def test_fsdp1_is_refused_and_the_fix_is_fsdp2(complete):
    (problem,) = compile_problems(on("cuda", Strategy("fsdp1")))
    assert "FSDP1" in problem.found and problem.fix == "--config fsdp; or --torch_compile false"
