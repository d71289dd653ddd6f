"""Decoder layers compiled in place: the same numbers from few graphs, and a line where a layer is left uncompiled."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kit.model.layers.compile
from kit.model.layers.compile import CompiledLayers, check_compile

CLASSES = ("LlamaDecoderLayer",)


@pytest.fixture(autouse=True)
def _no_graphs_of_others(monkeypatch):
    monkeypatch.setattr(kit.model.layers.compile, "BACKEND", "aot_eager")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def llama(implementation="sdpa"):
    shape = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, num_hidden_layers=3, max_position_embeddings=64, **shape, **heads)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def compiled(model):
    layers = CompiledLayers(model, CLASSES)
    layers.is_on = True
    return layers


def gradients(model, shapes):
    for number, shape in enumerate(shapes):
        torch.manual_seed(number)
        model(torch.randint(32, shape), use_cache=False).logits.square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
def test_layers_and_lengths_share_one_graph_with_the_gradients_of_plain_layers(monkeypatch, capsys):
    monkeypatch.setattr(kit.model.layers.compile, "MAX_GRAPHS", 1)
    model = llama()
    names = list(model.state_dict())
    layers = compiled(model)
    shapes = [(2, 19), (2, 7), (4, 12), (3, 16)]
    both = zip(gradients(model, shapes), gradients(llama(), shapes), strict=True)
    assert all(torch.equal(own, plain) for own, plain in both)
    assert layers.num_graphs == 1 and layers.num_layers == 3
    assert list(model.state_dict()) == names and type(model.model.layers[0]).__name__ in CLASSES
    gradients(model, [(1, 9), (1, 5)])  # a single row needs another graph
    assert layers.num_graphs == 1
    assert capsys.readouterr().out.count("more than 1 graphs") == 1


@pytest.mark.slow
def test_a_layer_that_is_not_one_graph_runs_plain_and_is_named(capsys):
    model = llama()
    layers = compiled(model)
    plain = model.model.layers[0].mlp.forward

    def breaking(hidden):
        print("x", float(hidden.sum()) > 1e9, file=open("/dev/null", "w"))  # noqa: SIM115
        return plain(hidden)

    model.model.layers[0].mlp.forward = breaking
    both = zip(gradients(model, [(2, 9)] * 2), gradients(llama(), [(2, 9)] * 2), strict=True)
    assert all(torch.equal(own, other) for own, other in both)
    said = capsys.readouterr().out
    assert said.count("LlamaDecoderLayer runs uncompiled because of a graph break") == 1
    assert layers.num_graphs == 0


def test_packing_with_layers_that_see_one_sample_at_a_time_is_refused():
    config = AutoConfig.for_model("lfm2", hidden_size=32, num_hidden_layers=2, layer_types=["conv"] * 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (problem,) = check_compile(model, ["Lfm2DecoderLayer"], packing=True)
    assert "Lfm2ShortConv with packing" in problem.found
    assert not check_compile(model, ["Lfm2DecoderLayer"], packing=False)
