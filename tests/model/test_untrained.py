"""A stop token whose lm_head row looks untrained is found from the weights; a trained one is not."""

import shutil

import pytest
import torch
from helpers import ROOT, make_model
from safetensors.torch import load_file, save_file

from kit.model.build import build_meta_model, open_config
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.untrained import check_stop_tokens

TINY = ROOT / "recipes/tiny/model"


def problems_of(recipe, *tokens):
    tokenizer, model = open_tokenizer(recipe), build_meta_model(recipe, open_config(recipe))
    return "\n".join(
        map(str, check_stop_tokens(recipe, model, tokenizer, tokenizer.convert_tokens_to_ids(list(tokens))))
    )


@pytest.mark.slow
def test_the_embedded_model_has_untrained_role_tokens_and_a_trained_end_token(recipe):
    assert problems_of(recipe(TINY), "<|end|>", "<|bos|>") == ""
    message = problems_of(recipe(TINY), "<|user|>")
    assert "<|user|> ends the answers" in message and "looks untrained, and lora freezes it" in message
    assert "--trainable_tokens '<|user|>'" in message
    assert "merged: python recipes/export.py final --output_dir merged" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "full"},
        {"trainable_tokens": ["<|user|>"]},
        {"lora_modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_row_that_trains_is_not_reported(recipe, changes):
    assert problems_of(recipe(TINY), "<|user|>") and problems_of(recipe(TINY, **changes), "<|user|>") == ""


@pytest.fixture
def with_rows(tmp_path):
    """A model, untied and in two files, whose rows 0 to 2 (all its special tokens) are those given."""

    def with_rows(rows, **shape):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        make_model(folder, **shape)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"][:3] = rows(weights["lm_head.weight"])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return with_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "is_found"),
    [
        (lambda head: head[:3], False),  # as other tokens
        (lambda head: torch.zeros(3, 32), True),
        (lambda head: head.mean(0).expand(3, -1), True),  # as after a resize
        (lambda head: head[7] + 1e-3 * torch.randn(3, 32), True),  # moved together
        (lambda head: head[7] + 1e-3 * torch.randn(3, 32) * torch.tensor([[20.0], [1], [1]]), False),  # one twin
    ],
)
def test_untrained_rows_are_found_by_each_of_the_four_cases(recipe, with_rows, rows, is_found):
    torch.manual_seed(0)
    assert bool(problems_of(recipe(with_rows(rows)), "<|im_end|>")) == is_found
