"""Decoder layers compiled in place: the same numbers from few graphs, and a line where a layer is left uncompiled."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kit.model.layers.compile
from kit.model.layers.compile import Compiler, why_not_compiled
from kit.system.errors import UserError

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


def compiled(model, falls_back=False):
    compiler = Compiler(falls_back)
    compiler.compile_layers(model, CLASSES)
    compiler.is_on = True
    return compiler


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


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
    assert num_graphs() == 1 and layers.what == "3 x LlamaDecoderLayer"
    assert list(model.state_dict()) == names and type(model.model.layers[0]).__name__ in CLASSES
    gradients(model, [(1, 9), (1, 5)])  # a single row needs another graph
    assert num_graphs() == 1
    assert capsys.readouterr().out.count("more than 1 graphs") == 1


@pytest.mark.slow
def test_a_layer_that_is_not_one_graph_runs_plain_and_is_named(capsys):
    model = llama()
    compiled(model)
    plain = model.model.layers[0].mlp.forward

    def breaking(hidden):
        print("x", float(hidden.sum()) > 1e9, file=open("/dev/null", "w"))  # noqa: SIM115
        return plain(hidden)

    model.model.layers[0].mlp.forward = breaking
    both = zip(gradients(model, [(2, 9)] * 2), gradients(llama(), [(2, 9)] * 2), strict=True)
    assert all(torch.equal(own, other) for own, other in both)
    said = capsys.readouterr().out
    assert said.count("LlamaDecoderLayer runs uncompiled because of a graph break") == 1
    assert num_graphs() == 0


@pytest.mark.slow
def test_a_failure_of_the_compiler_is_a_warning_by_default_and_an_error_where_asked_for(monkeypatch, capsys):
    def failing(graph, inputs):
        raise OSError("no C compiler")

    monkeypatch.setattr(kit.model.layers.compile, "BACKEND", failing)
    with pytest.raises(
        UserError, match=r"(?s)torch_compile: the compiler failed .*no C compiler.*--torch_compile false"
    ):
        compiled(model := llama())
        gradients(model, [(2, 9)])
    model = llama()
    compiler = compiled(model, falls_back=True)
    both = zip(gradients(model, [(2, 9)] * 2), gradients(llama(), [(2, 9)] * 2), strict=True)
    assert all(torch.equal(own, plain) for own, plain in both)
    assert list(compiler.left_out) == ["LlamaDecoderLayer"]
    assert capsys.readouterr().out.count("LlamaDecoderLayer runs uncompiled because the compiler failed") == 1


def test_layers_of_which_each_step_has_other_shapes_and_experts_are_left_out():
    config = AutoConfig.for_model("lfm2", hidden_size=32, num_hidden_layers=2, layer_types=["conv"] * 2)
    experts = AutoConfig.for_model("mixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    with torch.device("meta"):
        along_rows, mixture = map(AutoModelForCausalLM.from_config, (config, experts))
    for model, packing, by_default, why in (
        (along_rows, True, False, "Lfm2ShortConv"),
        (along_rows, False, True, "Lfm2ShortConv"),
        (along_rows, False, False, ""),
        (mixture, False, True, "experts"),
        (mixture, False, False, ""),
    ):
        found = why_not_compiled(model, ["AnyLayer"], packing, by_default)
        assert why in found and bool(found) == bool(why), (why, found)
    assert "does not name its decoder layers" in why_not_compiled(llama(), [], packing=False, by_default=False)
