"""The numbers of parameters are exact: those of the real classes."""

from collections import Counter
from dataclasses import replace

import pytest

from kit.memory.families import shape_of
from kit.system.errors import UserError
from kit.tools.plan.models import SHAPES, find_shape


@pytest.mark.slow
def test_every_shipped_shape_has_the_parameters_of_its_real_class():
    """And those that qlora puts into 4 bits, fused experts among them, routers not."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoConfig, AutoModelForCausalLM

    from kit.model.experts.packed import PackedExperts
    from kit.model.four_bit import quantised_on_meta

    for path in sorted(SHAPES.glob("*/config.json")):
        shape, config = find_shape(path.parent.name), AutoConfig.from_pretrained(path.parent)
        if shape.tower:
            continue
        config.num_hidden_layers = 2  # all are the same, and two are made sooner
        if config.layer_types if hasattr(config, "layer_types") else None:
            config.layer_types = config.layer_types[:2]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert model.num_parameters() == 2 * shape.layer_parameters + shape.root_parameters, path.parent.name
        of_layer = ((name, m) for name, m in model.named_modules() if ".layers.0." in name)
        linear = {name.rpartition(".")[2]: m for name, m in of_layer if isinstance(m, torch.nn.Linear)}
        found = {name: (m.in_features, m.out_features, m.bias is not None) for name, m in linear.items()}
        assert found == {each.name: (each.inputs, each.outputs, each.bias) for each in shape.linears}, path.parent.name
        packed = [m for m in quantised_on_meta(model).modules() if isinstance(m, Linear4bit | PackedExperts)]
        assert sum(m.weight.numel() for m in packed) == 2 * shape.layer_matrices, path.parent.name


@pytest.mark.slow
def test_a_model_that_reads_images_has_the_parameters_of_its_real_class(tmp_path):
    """Also the weights of its text that qlora puts into 4 bits, which no formula reads from the model."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from vision_models import FAMILIES, make_vision_model

    from kit.model.four_bit import quantised_on_meta

    shipped = [path.parent for path in SHAPES.glob("*/config.json") if find_shape(path.parent.name).tower]
    planned = FAMILIES.keys() - {"idefics2"}  # whose resampler no formula describes
    made = [make_vision_model(family, tmp_path / family) for family in sorted(planned)]
    assert len(shipped) == 14
    for folder in (*shipped, *made):
        shape, config = find_shape(str(folder)), AutoConfig.from_pretrained(folder)
        assert shape_of(config.to_dict(), "opened") == replace(shape, name="opened", folder=None)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        kinds = Counter(tuple(sorted(_linears(layer).items())) for layer in model.get_decoder().layers)
        assert kinds == {
            tuple(sorted((e.path, (e.inputs, e.outputs)) for e in kind.linears)): n for n, kind in shape.kinds
        }
        assert model.num_parameters() == shape.num_parameters, folder
        sizes = [
            m.in_features * m.out_features for m in quantised_on_meta(model).modules() if hasattr(m, "quant_state")
        ]
        assert sum(sizes) == shape.linear_weights + shape.tower.linear_weights, folder


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # Layers, hidden and feed-forward size, heads; whether gated, LayerNorm, and norms of heads.
        ("qwen2.5-vl-7b", (32, 1280, 3420, 16, True, False, "")),
        ("qwen3-vl-4b", (24, 1024, 4096, 16, False, True, "")),
        ("gemma-4-e2b", (16, 768, 3072, 12, True, False, "head")),
        ("ministral-3-3b", (24, 1024, 4096, 16, True, False, "")),
        ("gemma-3-4b", (27, 1152, 4304, 16, False, True, "")),
    ],
)
def test_the_layers_of_an_encoder_are_read_from_the_model(name, layers):
    """The sizes are those of the published configs."""
    tower = find_shape(name).tower
    own = tower.layers
    sizes = own.num_layers, own.hidden_size, own.intermediate_size, own.num_heads
    assert (*sizes, own.gated, own.layer_norm, own.norm_of_heads) == layers
    assert own.own_vectors == 0 and own.kv_size == own.query_size == own.hidden_size


def test_a_family_without_a_line_is_read_or_refused():
    """GLM-4.1V's text is in no table. Llama 4 has experts of its own, and Idefics 2 a resampler of every patch."""
    shape = shape_of({"model_type": "glm4v", "vision_config": {}, "text_config": {}}, "glm")
    assert shape.num_parameters == 10_292_777_472
    assert (shape.num_norms, [each.name for each in shape.linears][-2:]) == (4, ["gate_up_proj", "down_proj"])
    for kind, of_text, message in (
        ("llama4", {"num_hidden_layers": 2}, "do not cover the family 'llama4_text'"),
        ("idefics2", {"model_type": "mistral", "num_hidden_layers": 2}, "its projector has layers with attention"),
        ("no_such_model", {}, "cannot be built without weights"),
    ):
        with pytest.raises(UserError, match=message):
            shape_of({"model_type": kind, "vision_config": {}, "text_config": of_text}, kind)


def _linears(layer):
    import torch

    linear = {name: m for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: (m.in_features, m.out_features) for name, m in linear.items()}


def test_adapters_on_experts_have_the_parameters_of_peft():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        shape, config = replace(find_shape(name), num_layers=2), AutoConfig.from_pretrained(SHAPES / name)
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tensors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        attention = [f"{each}_proj" for each in "qkvo"]  # peft changes ranks of other ways to say all
        lora = LoraConfig(r=4, target_modules=attention, target_parameters=tensors, init_lora_weights=False)
        found = get_peft_model(model, lora, low_cpu_mem_usage=True).get_nb_trainable_parameters()[0]
        names = tuple(shape.names_in_layers(["all-linear", *tensors])[0])
        assert found == shape.adapter_parameters(4, names) > 3 * shape.adapter_parameters(4), name
