"""torch_compile on each device and strategy, and the refusals."""

from kit.strategy import compiler
from kit.strategy.compiler import compile_problems, resolve_compile
from kit.strategy.strategies import FSDP1, SINGLE
from kit.strategy.topology import Topology


def on(device_type, strategy=SINGLE):
    return Topology(strategy=strategy, config_name="x", num_processes=1, mixed_precision="no", device_type=device_type)


def test_the_recipe_decides_before_the_config_and_auto_is_for_cuda(monkeypatch, recipe):
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)
    for asked, config_asks, device_type, compiles in [
        ({}, True, "cpu", True),
        ({"torch_compile": False}, True, "cuda", False),
        ({"torch_compile": "auto"}, False, "cuda", True),
        ({"torch_compile": "auto"}, False, "cpu", False),
    ]:
        found, said = resolve_compile(recipe(**asked), config_asks, on(device_type))
        assert found is compiles and bool(said) == (asked.get("torch_compile") == "auto" and not compiles), asked


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
