"""qat computes what torchao's own fake quantisation and its quantised model do; weights and names stay plain."""

from copy import deepcopy

import pytest
import torch
from helpers import matrix
from model_helpers import BF16, FP32, build, problems
from transformers import LlamaForCausalLM

from kit.config.recipe import Recipe
from kit.model import qat
from kit.model.load import open_config
from kit.model.plan import LoadPlan

TINY = "recipes/tiny/model"
IDS = torch.arange(60).view(3, 20)
needs_torchao = pytest.mark.skipif(qat.find_spec("torchao") is None, reason="the extra qat is not installed")


def recipe(**values):
    defaults = {"model_name_or_path": TINY, "dataset": "x", "max_length": 256, "method": "full"}
    return Recipe(**defaults | {"qat": "int4_weight_only"} | values)


def theirs(settings, step="prepare", dtype=torch.float32):
    """The plain model, as torchao alone prepares it, or quantises it."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = LlamaForCausalLM.from_pretrained(TINY, dtype=dtype)
    config = qat.quantised_as(settings)
    names = set(qat.layers(model))
    assert len(names) == 7 * model.config.num_hidden_layers
    quantize_(model, QATConfig(config, step=step) if step else config, filter_fn=lambda _, name: name in names)
    return model.train()


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


SCHEMES = matrix(list(qat.SCHEMES), always=4)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_full_model_has_the_logits_and_gradients_of_torchaos_own_preparation(scheme):
    settings = recipe(qat=scheme)
    ours, other = build(settings, FP32), theirs(settings)
    wanted = gradients(other)
    assert torch.equal(ours(input_ids=IDS).logits, other(input_ids=IDS).logits)
    other.zero_grad()
    found = gradients(ours)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_quantised_model_computes_bit_for_bit_what_is_trained(scheme):
    settings = recipe(qat=scheme)
    for plan, dtype in ((FP32, torch.float32), (BF16, torch.bfloat16)):
        model = build(settings, plan)
        linear = "model.layers.0.mlp.up_proj"
        quantised = theirs(settings, step=None, dtype=dtype).get_submodule(linear)
        x = torch.randn(5, quantised.in_features, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = model.get_submodule(linear)(x)
        assert torch.equal(found, quantised(x.to(dtype)))


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_base_of_an_adapter_is_rounded_and_the_adapter_is_not(scheme):
    settings = recipe(qat=scheme, method="lora")
    ours, other = build(settings, FP32), theirs(settings)
    assert torch.equal(ours(input_ids=IDS).logits, other(input_ids=IDS).logits)  # B = 0
    assert not any("fake_quantizer" in name for name, _ in ours.named_modules() if "lora_" in name)
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@needs_torchao
@pytest.mark.parametrize("method", ["full", "lora"])
def test_names_and_weights_are_those_without_it_and_so_are_ranks_without_weights(method):
    scheme = "int8_dynamic_activation_int4_weight"
    plain, ours = (build(recipe(method=method, qat=each), FP32) for each in (None, scheme))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    if method == "full":
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    empty = build(recipe(method=method, qat=scheme), LoadPlan(compute_dtype="float32", device="meta"))
    both = zip(ours.named_parameters(), empty.named_parameters(), strict=True)
    assert all((n, p.requires_grad, p.shape) == (m, q.requires_grad, q.shape) for (n, p), (m, q) in both)


@needs_torchao
def test_groups_that_do_not_divide_a_row_are_refused_with_the_size_that_does():
    found = problems(recipe(qat_group_size=48))
    assert "qat_group_size: groups of 48 weights, and model.layers.0" in found and "--qat_group_size 32" in found
    assert not problems(recipe(qat_group_size=32)) and not problems(recipe(qat="int8_weight_only"))


@needs_torchao
def test_the_log_says_what_is_rounded():
    line = qat.describe_qat(recipe(qat="int8_dynamic_activation_int4_weight", method="lora"))
    assert "rounded to 4 bits, a scale for 32 weights, and their inputs to 8 bits" in line
    assert "the adapter is not rounded" in line
    assert "8 bits, a scale for a row" in qat.describe_qat(recipe(qat="int8_weight_only"))


def test_without_torchao_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(qat, "find_spec", lambda name: None)
    assert 'qat: torchao is not installed\n    -> pip install "accelerate-recipes[qat]"' in problems(recipe())


@needs_torchao
def test_files_of_8_bits_are_refused(tmp_path):
    config = deepcopy(open_config(recipe()))
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    assert "hold FP8; expected a base that is not rounded yet" in problems(recipe(model_name_or_path=str(tmp_path)))
