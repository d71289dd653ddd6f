"""The numbers of parameters are exact: those of the real classes."""

import pytest

from kit.tools.plan.models import SHAPES, find_shape


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
