"""Fused experts in 4 bits, and LoRA on them: the results of transformers and peft on the plain weights."""

import weakref
from copy import deepcopy
from dataclasses import replace

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from model_helpers import BF16, FP32, build, problems
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.model.adapters.adapter import adapters_off
from kit.model.experts import packed
from kit.model.experts.packed import PackedExperts
from kit.model.experts.products import Routes

# Beside the usual layout: transposed with biases and a gate of its own, and without a gate.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h")


@pytest.fixture
def experts(recipe, tmp_path):
    """Make a model of a family with LoRA on its experts that is not zero."""

    def make(family, plan=FP32, **changes):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(tiny_config(family))
        names = {name.rpartition(".")[2] for name, p in base.named_parameters() if p.dim() == 3 and ".experts." in name}
        base.save_pretrained(tmp_path / family)
        targets = ["all-linear", *(f"experts.{name}" for name in sorted(names))]
        options = {"method": "qlora", "lora_target_modules": targets, "lora_r": 4, "max_length": 64}
        mine = recipe(model_name_or_path=str(tmp_path / family), **options | changes)
        assert problems(mine) == ""
        model = build(mine, plan)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name and not parameter.is_meta:
                parameter.data = torch.randn_like(parameter) / 8
        return model

    return make


def by_peft(model):
    """Let transformers and peft compute the experts, with plain weights that bitsandbytes has dequantised."""
    for module in list(model.modules()):
        if isinstance(module, ParamWrapper) or hasattr(module, "has_gate"):
            module.__dict__.pop("forward", None)
        for name, child in list(module.named_children()):
            if isinstance(child, PackedExperts):
                state = deepcopy(child.quant_state)
                state.shape = torch.Size([child.shape.numel()])
                plain = dequantize_4bit(child.weight.data, state).view(child.shape)
                delattr(module, name)
                setattr(module, name, torch.nn.Parameter(plain, requires_grad=False))
    return model


def results(model):
    """The hidden states of some tokens, and the gradients of what trains, by name."""
    ids = torch.arange(60).view(3, 20) * 7 % 90 + 5
    states = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    (states.float() * weights).mean().backward()
    return {"states": states.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_dequantised_weights(experts, family):
    for method in ("qlora", "lora"):
        ours = experts(family, method=method)
        assert any(isinstance(module, PackedExperts) for module in ours.modules()) == (method == "qlora")
        theirs = by_peft(experts(family, method=method))
        found, wanted = results(ours), results(theirs)
        assert any("experts" in name for name in found)
        assert found.keys() == wanted.keys()
        errors = {name: float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items()}
        assert max(errors.values()) < 1e-5, errors
        with torch.no_grad(), adapters_off(ours), adapters_off(theirs):
            ids = torch.arange(5, 45).view(2, 20)
            assert torch.allclose(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=0, atol=1e-6)


def test_under_autocast_errors_are_no_larger_than_those_of_peft(experts):
    ours, theirs, exact = (experts("qwen3_moe", BF16, method="lora") for _ in range(3))
    exact = results(by_peft(exact).float())
    errors = []
    for model in (ours, by_peft(theirs)):
        with torch.autocast("cpu", torch.bfloat16):
            found = results(model)
        errors.append({name: (value.float() - exact[name]).norm() for name, value in found.items()})
    assert sum(errors[0].values()) < 1.1 * sum(errors[1].values())


def test_few_experts_are_plain_at_a_time(experts, monkeypatch):
    model = experts("qwen3_moe")
    whole = results(experts("qwen3_moe"))
    sizes, storages = [], []

    def record(values, state):
        assert all(storage() is None for storage in storages), "plain weights of the last run"
        sizes.append(values.numel() * 2 * state.dtype.itemsize)
        plain = dequantize_4bit(values, state)
        storages.append(weakref.ref(plain.untyped_storage()))
        return plain

    largest = max(m.shape[1:].numel() * 4 for m in model.modules() if isinstance(m, PackedExperts))
    monkeypatch.setattr(packed, "MAX_BYTES", largest)
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", record)
    found = results(model)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert max(sizes) == largest and len(sizes) > 8


def test_runs_are_consecutive_experts_that_have_tokens():
    routes = Routes.of(torch.tensor([[1, 5], [5, 2], [1, 6], [1, 5]]), 8, is_grouped=True)
    assert routes.counts == [0, 3, 1, 0, 0, 3, 1, 0]
    assert list(routes.runs(8)) == [(slice(1, 3), slice(0, 4)), (slice(5, 7), slice(4, 8))]
    assert [experts for experts, _ in routes.runs(1)] == [slice(1, 2), slice(2, 3), slice(5, 6), slice(6, 7)]
    assert routes.experts[routes.inverse].tolist() == [1, 5, 5, 2, 1, 6, 1, 5]


@pytest.mark.parametrize("plan", [BF16, FP32])
def test_a_rank_without_weights_builds_what_the_one_with_weights_has(experts, plan):
    read, empty = experts("qwen3_moe", plan), experts("qwen3_moe", replace(plan, reads_weights=False))
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (read, empty)]
    assert shapes[0] == shapes[1] and all(p.is_meta for p in empty.parameters())
    for one, other in zip(read.modules(), empty.modules(), strict=True):
        if isinstance(one, PackedExperts):
            assert one.shape == other.shape and one.weight.dtype == other.weight.dtype
            assert one.quant_state.absmax.shape == other.quant_state.absmax.shape


def test_dropout_drops_the_input_of_experts_in_training_only(experts):
    model = experts("qwen3_moe", method="lora", lora_dropout=0.5)
    assert model.peft_config["default"].lora_dropout == 0  # peft would not open it
    ids = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        model.eval()
        theirs = by_peft(experts("qwen3_moe", method="lora")).eval()
        plain = model(input_ids=ids).logits
        assert torch.allclose(plain, theirs(input_ids=ids).logits, atol=1e-6)
        model.train()
        assert not torch.allclose(plain, model(input_ids=ids).logits, atol=1e-4)


def test_dropout_is_that_of_the_flag_where_a_saved_adapter_is_continued(experts, tmp_path):
    saved = experts("qwen3_moe", method="lora", lora_dropout=0.5)
    saved.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(5, 45).view(2, 20)
    for dropout in (0, 0.5):
        model = experts(
            "qwen3_moe", adapter_name_or_path=str(tmp_path / "adapter"), method="lora", lora_dropout=dropout
        )
        with torch.no_grad():
            differ = not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert differ == bool(dropout)


def test_dropout_is_refused_where_the_family_computes_its_experts_itself(recipe, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama4_text")).save_pretrained(tmp_path)
    options = {"lora_target_modules": ["q_proj", "experts.down_proj"], "lora_dropout": 0.1, "max_length": 64}
    text = problems(recipe(model_name_or_path=str(tmp_path), method="lora", **options))
    assert "lora_dropout, and the family computes Llama4TextExperts itself" in text
