"""Embedding and lm_head rows of new tokens, trainable token rows, and modules_to_save."""

import pytest
import torch
from model_helpers import BF16, FP32, build, problems

from kit.model.adapters.token_rows import num_rows
from kit.model.build import build_meta_model, open_config

NEW = ["<a>", "<b>"]


def trained(model):
    """Names of what trains, without adapters, and their number of rows."""
    prefix = "base_model.model."
    parameters = [(name.removeprefix(prefix), p) for name, p in model.named_parameters() if p.requires_grad]
    return {name.removeprefix("model."): len(p) for name, p in parameters if "lora_" not in name}


def test_new_rows_are_the_mean_of_the_others_at_every_start(recipe):
    mine = recipe(new_tokens=NEW, method="full")
    model, again = build(mine, FP32), build(mine, FP32)
    for table in ("get_input_embeddings", "get_output_embeddings"):
        weight = getattr(model, table)().weight
        assert weight.shape[0] == 322 == model.config.vocab_size
        assert torch.equal(weight, getattr(again, table)().weight)
        assert torch.allclose(weight[320:], weight[:320].mean(0).expand(2, -1)) and weight.requires_grad
    assert num_rows(build_meta_model(mine, open_config(mine))) == 322


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "changes", "rows"),
    [
        (False, {"new_tokens": NEW}, {"embed_tokens.token_adapter.trainable_tokens_delta.default": 2,
                                      "lm_head.token_adapter.trainable_tokens_delta.default": 2}),
        (False, {"new_tokens": NEW, "lora_modules_to_save": ["lm_head"]},
         {"embed_tokens.token_adapter.trainable_tokens_delta.default": 2,
          "lm_head.modules_to_save.default.weight": 322}),
        (True, {"new_tokens": NEW, "lora_modules_to_save": ["embed_tokens"]},
         {"embed_tokens.modules_to_save.default.weight": 322}),
        (False, {"lora_modules_to_save": ["norm"]}, {"norm.modules_to_save.default.weight": 32}),
    ],
)  # fmt: skip
def test_what_trains_with_the_adapters(recipe, model_folder, tied, tie, changes, rows):
    """In float32, also on a bf16 base; ``norm`` is not ``input_layernorm``."""
    model = build(recipe(tied if tie else model_folder, **changes), BF16)
    assert trained(model) == rows
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "changes", "message"),
    [
        (False, {"lora_modules_to_save": ["lm_haed"]}, "did you mean 'lm_head'"),
        (False, {"lora_modules_to_save": ["mlp"]}, "'mlp' gets an adapter, or holds modules that do"),
        (True, {"lora_modules_to_save": ["lm_head"]}, "--lora_modules_to_save embed_tokens"),
        (False, {"new_tokens": NEW, "lora_target_modules": ["lm_head"]}, "new_tokens: lm_head gets an adapter"),
    ],
)
def test_what_cannot_train_is_refused_before_loading(recipe, model_folder, tied, tie, changes, message):
    assert message in problems(recipe(tied if tie else model_folder, **changes))
    assert problems(recipe(tied if tie else model_folder, **changes, method="full")) == ""
