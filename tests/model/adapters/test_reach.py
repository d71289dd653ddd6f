"""Parameters without gradients from text are found by the model's own forward, frozen and reported."""

import pytest
import torch
from model_helpers import on_meta
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.config.settings.method import MethodSettings
from kit.model.adapters.reach import freeze_unreached_parts, unreached_parts
from kit.model.summary import describe_parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("gemma3", ["model.vision_tower", "model.multi_modal_projector"]),
        ("afmoe", ["model.layers.1.mlp.expert_bias"]),
        ("trocr", ["model.decoder.layers.0.encoder_attn", "model.decoder.layers.0.encoder_attn_layer_norm"]),
        ("llama", []),
    ],
)
def test_what_gets_no_gradient_from_text_is_frozen_and_reported(family, parts):
    model = on_meta(family)
    found = unreached_parts(model)
    assert set(parts) <= set(found) and bool(parts) == bool(found)
    freeze_unreached_parts(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert all(name.startswith(tuple(found)) for name in frozen) and bool(frozen) == bool(parts)
    lines = "\n".join(describe_parts(model, MethodSettings(model_name_or_path="m", method="full")))
    assert all(part in lines for part in parts[:3])
    assert (
        "train_only does not name" if family == "gemma3" else "no gradient from text" if parts else "weights"
    ) in lines


def test_the_head_of_a_model_that_computes_its_router_loss_trains():
    config = tiny_config("mixtral")
    config.output_router_logits = True
    with torch.device("meta"):
        assert unreached_parts(AutoModelForCausalLM.from_config(config)) == []
