"""The shape of a model is read from the values of its config.json, or they are refused."""

import json

import pytest
from helpers import ROOT

from kit.memory.families import shape_of
from kit.system.errors import UserError

LLAMA = json.loads((ROOT / "recipes/shapes/llama-8b/config.json").read_text())


def test_what_a_config_leaves_out_is_what_its_family_has():
    shape = shape_of(LLAMA, "llama")
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.qkv_bias) == (8, 128, False, False)
    old = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")}
    assert (shape_of(old, "old").num_kv_heads, shape_of(old, "old").head_dim) == (32, 128)
    assert shape_of(LLAMA | {"model_type": "qwen2"}, "qwen").qkv_bias
    opened = json.loads((ROOT / "recipes/shapes/qwen3-30b-a3b/config.json").read_text())
    of_hub = {{"num_local_experts": "num_experts"}.get(key, key): value for key, value in opened.items()}
    assert shape_of(of_hub, "moe") == shape_of(opened, "moe") and shape_of(of_hub, "moe").experts.number == 128


def test_another_family_and_values_that_are_no_sizes_are_refused():
    for changes, message in (
        ({"model_type": "mamba"}, "do not cover the family 'mamba'"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
    ):
        with pytest.raises(UserError, match=message):
            shape_of(LLAMA | changes, "mine")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma-4-e4b", {"layer_types": ["full_attention"]}),
        ("gemma-4-e4b", {"per_layer_config": {"99": {"head_dim": 8}}}),
        ("gemma-4-e4b", {"per_layer_config": {"5": 8}}),
        ("gemma-4-e4b", {"global_head_dim": 0}),
        ("qwen3.5-4b", {"linear_num_key_heads": None}),
        ("qwen3.5-4b", {"linear_num_key_heads": 0}),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 0}),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}),
        ("gpt-oss-20b", {"num_local_experts": None}),
    ],
)
def test_layers_of_several_kinds_whose_sizes_cannot_be_read_are_refused(name, changes):
    config = json.loads((ROOT / "recipes/shapes" / name / "config.json").read_text())
    with pytest.raises(UserError, match=r"its layers cannot be read|cannot be built|it has .* parameters, by formulas"):
        inner = {"text_config": config["text_config"] | changes} if "text_config" in config else changes
        shape_of(config | inner, "mine")
