"""4-bit weights that are kept apart from where they are made, and models on meta that are sent them."""

import os
import subprocess
import sys
from dataclasses import replace

import bitsandbytes
import pytest
import torch
from helpers import ROOT
from model_helpers import BF16, FP32, build
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize

from kit.model import four_bit


def tables(model):
    """The tensors of the tables, and what else the state of a 4-bit weight holds, by the name of its module."""
    found = {}
    for name, module in model.named_modules():
        for prefix, state in (("", getattr(module, "quant_state", None)), ("2", getattr(module, "state2", None))):
            if state is not None:
                found |= {f"{name}{prefix}.{key}": value for key, value in vars(state).items() if key != "state2"}
    return found


def form(value):
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("plan", [BF16, FP32])
def test_a_rank_without_weights_builds_what_the_one_with_weights_has(recipe, plan):
    mine = recipe(method="qlora")
    read, empty = build(mine, plan), build(mine, replace(plan, reads_weights=False))
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert {name: p.shape for name, p in read.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
    packed = {name: p.dtype for name, p in read.named_parameters() if type(p).__name__ == "Params4bit"}
    assert packed and packed == {
        name: p.dtype for name, p in empty.named_parameters() if type(p).__name__ == "Params4bit"
    }
    assert {name: form(value) for name, value in tables(read).items()} == {
        name: form(value) for name, value in tables(empty).items()
    }


def test_weights_are_quantised_on_the_given_device_and_kept_on_the_cpu(recipe, monkeypatch):
    made = []
    quantise = bitsandbytes.functional.quantize_4bit

    def spy(weight, **settings):
        made.append(weight.device)
        return quantise(weight.cpu(), **settings)

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", spy)
    plain = build(recipe(method="qlora"), BF16)
    assert {device.type for device in made} == {"cpu"}
    made.clear()

    moved = []  # stands in for a GPU, which is not here: weights are sent there before they are quantised
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda w, *a, **k: to(w, *(moved.append(x) or "cpu" if x == "cuda:0" else x for x in a), **k),
    )
    there = build(recipe(method="qlora"), replace(BF16, quantise_on="cuda:0"))
    assert len(moved) == len(made) == 7 * len(there.get_base_model().model.layers)
    expected = dict(plain.named_parameters())
    for name, parameter in there.named_parameters():
        bits, expected_bits = (p.detach().view(torch.uint8) for p in (parameter, expected[name]))
        assert parameter.device.type == "cpu" and torch.equal(bits, expected_bits), name


def test_afterwards_transformers_quantises_as_before():
    plain = Bnb4bitQuantize.convert
    with pytest.raises(OSError), four_bit.quantising_on("cuda:0"):
        assert Bnb4bitQuantize.convert is not plain
        raise OSError
    assert Bnb4bitQuantize.convert is plain


@pytest.mark.slow
def test_a_broken_bitsandbytes_is_imported_only_where_it_is_needed(tmp_path):
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes/__init__.py").write_text("raise OSError('libcudart.so: no such file')")
    code = "import kit.preflight, kit.tools.doctor.machine, kit.export.folders, kit.strategy.accelerator"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_a_model_packed_on_meta_leaves_no_table_of_bitsandbytes_there(recipe):
    """bitsandbytes keeps a table for the process."""
    code = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from bitsandbytes.functional import quantize_4bit
from kit.model.four_bit import packed_on_meta
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}))
packed_on_meta(model, torch.float32)
print(quantize_4bit(torch.ones(64, 64), compress_statistics=True)[1].state2.code.sum())
"""
    words = [sys.executable, "-c", code.format(folder=recipe().model_name_or_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packing_on_meta_keeps_the_names_of_experts():
    """transformers divides fused experts in a model that is opened in 4 bits, but not in one that is quantised now."""
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, head_dim=16,
    )  # fmt: skip
    with torch.device("meta"):
        plain = Llama4ForCausalLM(config)
    packed = four_bit.packed_on_meta(plain, torch.float32)
    assert dict(packed.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert packed.config._is_quantized and packed.is_loaded_in_4bit
