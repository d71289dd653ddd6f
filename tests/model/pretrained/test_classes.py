"""Vision-language models are loaded, trained on text, and saved with an unchanged vision tower."""

import json

import pytest
import torch
from helpers import matrix
from model_helpers import BF16
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from benchmarks.tiny_families import make_model, tiny_config
from kit.config.recipe import Recipe
from kit.export.final import write_model
from kit.model.build import build_meta_model, build_model, open_config
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.strategy.weights import whole_state
from kit.system.errors import UserError

FAMILIES = ["mistral3", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llama4"]
TOWERS = ("vision", "visual", "projector", "connector")


@pytest.fixture
def built(tmp_path):
    """A tiny model of a family, opened as a run opens it, with its recipe."""

    def built(family, plan, **settings):
        folder = tmp_path / "base"
        make_model(family, folder)
        (folder / "preprocessor_config.json").write_text('{"size": 8}')
        recipe = Recipe(model_name_or_path=str(folder), dataset="x.jsonl", max_length=48, **settings)
        return recipe, build_model(recipe, open_config(recipe), plan, packing=recipe.packing)

    return built


def one_step(model):
    """Change all that trains, as one update does."""
    ids = torch.randint(3, 100, (2, 12))
    model(input_ids=ids, targets=ids[:, 1:].flatten()[:11], target_positions=torch.arange(11)).sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    return without


@pytest.mark.parametrize("family", matrix(FAMILIES))
def test_a_full_run_saves_the_whole_model_with_its_vision_tower_bit_for_bit(built, tmp_path, family):
    recipe, model = built(family, BF16, method="full")
    assert one_step(model) == []
    final = tmp_path / "final"
    final.mkdir()
    write_model(final, model, whole_state(model), open_tokenizer(recipe), "card", torch.float32)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", final))
    assert set(after) == set(before)
    for name, tensor in before.items():
        is_tower = any(word in name for word in TOWERS)
        assert not is_tower or torch.equal(after[name], tensor), name
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    again, loaded = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert again.config.architectures == json.loads((tmp_path / "base/config.json").read_text())["architectures"]
    assert (final / "preprocessor_config.json").read_text() == '{"size": 8}'


def test_a_model_with_an_encoder_for_its_text_is_refused_by_name():
    recipe = Recipe(model_name_or_path="org/model", dataset="x.jsonl", max_length=8)
    with pytest.raises(UserError, match="not a causal language model: udop is an encoder and a decoder"):
        build_meta_model(recipe, tiny_config("udop"))
