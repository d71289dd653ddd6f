"""The numbers of parameters are exact: they are those that were published, and those of the real classes."""

import pytest

from kit.tools.plan.models import SHAPES, find_shape

# From the model cards and papers.
PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma-3-1b": 999_885_952,
    "gemma-2-2b": 2_614_341_888,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-7b": 7_298_617_344,
}


def test_a_shape_has_as_many_parameters_as_were_published():
    for name, number in PUBLISHED.items():
        assert find_shape(name).num_parameters == number, (name, number)


@pytest.mark.slow
def test_every_shipped_shape_has_the_parameters_of_its_real_class():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for path in sorted(SHAPES.glob("*/config.json")):
        shape, config = find_shape(path.parent.name), AutoConfig.from_pretrained(path.parent)
        config.num_hidden_layers = 2  # all are the same, and two are made sooner
        if config.layer_types if hasattr(config, "layer_types") else None:
            config.layer_types = config.layer_types[:2]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert model.num_parameters() == 2 * shape.layer_parameters + shape.root_parameters, path.parent.name
        linear = {n.rpartition(".")[2]: m for n, m in model.named_modules() if ".layers.0." in n and hasattr(m, "bias")}
        found = {name: (m.in_features, m.out_features, m.bias is not None) for name, m in linear.items()}
        assert found == {each.name: (each.inputs, each.outputs, each.bias) for each in shape.linears}, path.parent.name
