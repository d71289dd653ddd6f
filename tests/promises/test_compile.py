"""Compiled layers learn what plain ones do, under each strategy and with each method."""

import pytest
from helpers import matrix

import kit.model.layers.compile
import kit.preflight.preflight

pytestmark = pytest.mark.slow

CASES = [
    ("fsdp", 2, {"method": "lora", "packing": False, "gradient_checkpointing": True}),
    ("single", 1, {"method": "lora", "packing": True, "gradient_checkpointing": True}),
    ("ddp", 2, {"method": "full", "packing": False, "gradient_checkpointing": True}),
    ("single", 1, {"method": "qlora", "packing": False, "gradient_checkpointing": True}),
]


def by_aot_eager(_rank):
    """Each operator of a graph then runs as it would without the graph, so that every bit is the same."""
    kit.model.layers.compile.BACKEND = "aot_eager"


@pytest.mark.parametrize(("config", "processes", "flags"), matrix(CASES))
def test_compiled_layers_compute_the_same_digits(finetune, fp32, config, processes, flags):
    flags = {"config": fp32[config], **flags}
    plain = finetune.ok("plain", processes, **flags)
    compiled = finetune.ok("compiled", processes, prepare=by_aot_eager, torch_compile=True, **flags)
    assert compiled.losses == plain.losses and compiled.grad_norms == plain.grad_norms
    # FSDP2's gathering takes the tables of 4-bit weights, and bitsandbytes puts them back in the forward. Packs have no
    # kernel on a CPU.
    is_left_out = (config, flags["method"]) == ("fsdp", "qlora") or flags["packing"]
    assert ("runs uncompiled" in compiled.output) == is_left_out


def by_a_compiler_that_fails_on_rank_1(rank):
    """As on a machine without a C compiler, where ``auto`` compiles."""

    def failing(graph, inputs):
        raise OSError("no C compiler")

    kit.model.layers.compile.BACKEND = failing if rank else "aot_eager"
    kit.preflight.preflight.why_not_by_default = lambda *_: ""


def test_a_compiler_that_fails_on_one_rank_lets_all_run_uncompiled(finetune, fp32):
    flags = {"config": fp32["fsdp"], "method": "lora", "packing": False, "max_steps": 2}
    plain = finetune.ok("plain", 2, **flags)
    fallen = finetune.ok("fallen", 2, prepare=by_a_compiler_that_fails_on_rank_1, **flags)
    assert fallen.losses == plain.losses
    assert "torch_compile auto: on" in fallen.output
    assert fallen.output.count("LlamaDecoderLayer runs uncompiled because the compiler failed") == 1
