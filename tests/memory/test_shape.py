"""The numbers of parameters are exact: those of the real classes."""

from collections import Counter
from dataclasses import replace

import pytest

from kit.memory.families import shape_of
from kit.memory.towers import TOWERS
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
def test_a_tower_has_the_parameters_of_its_real_class(tmp_path):
    """Of each family that is planned, also the weights that qlora puts into 4 bits.

    The tiny Gemma 3 has a head in its tower that the real ones lack.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from vision_models import FAMILIES, make_vision_model

    from kit.model.four_bit import quantised_on_meta

    shipped = [path.parent for path in SHAPES.glob("*/config.json") if find_shape(path.parent.name).tower]
    made = [make_vision_model(family, tmp_path / family) for family in TOWERS.keys() & FAMILIES if family != "gemma3"]
    assert len(shipped) == 14
    for folder in (*shipped, *made):
        shape, config = find_shape(str(folder)), AutoConfig.from_pretrained(folder)
        assert shape_of(config.to_dict(), "opened") == replace(shape, name="opened", folder=None)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            text = next(each for each in ("language_model", "text_model") if hasattr(model.model, each))
            layers = getattr(model.model, text).layers
        kinds = Counter(tuple(sorted(_linears(layer).items())) for layer in layers)
        assert kinds == {
            tuple(sorted((e.path, (e.inputs, e.outputs)) for e in kind.linears)): n for n, kind in shape.kinds
        }
        assert model.num_parameters() == shape.num_parameters, folder
        sizes = [
            m.in_features * m.out_features for m in quantised_on_meta(model).modules() if hasattr(m, "quant_state")
        ]
        assert sum(sizes) == shape.linear_weights + shape.tower.linear_weights, folder


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
