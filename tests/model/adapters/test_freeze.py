"""Frozen parameters do not train and keep their bits; a pattern that matches nothing is refused."""

import pytest
import torch
from model_helpers import BF16, build, problems
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"freeze": "model.embed_tokens*,model.layers.[01].*"}, ("model.layers.2.", "model.norm.", "lm_head.")),
        ({"train_only": "model.layers.2.*,lm_head.weight"}, ("model.layers.2.", "lm_head.")),
        ({"train_only": "model.layers.*", "freeze": "model.layers.[01].*"}, ("model.layers.2.",)),
    ],
)
def test_patterns_select_what_trains_and_the_rest_keeps_its_bits(recipe, model_folder, tmp_path, settings, trained):
    stored = torch.float32 if "freeze" in settings else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=stored)
    base.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    settings = recipe(tmp_path, method="full", **settings)
    assert problems(settings) == ""
    for name, parameter in build(settings, BF16).named_parameters():
        trains = name.startswith(trained)
        assert parameter.requires_grad == trains, name
        assert parameter.dtype == (torch.float32 if trains else stored), name
        assert torch.equal(parameter, base.get_parameter(name).to(parameter.dtype)), name


def test_a_pattern_that_matches_nothing_is_refused(recipe):
    for field in ["freeze", "train_only"]:
        text = problems(recipe(method="full", **{field: "lm_head.*,model.norm.wieght"}))
        assert text.startswith(f"{field}: 'model.norm.wieght' matches no parameter; expected a pattern such as")
        assert "did you mean 'model.norm.weight'?" in text and "lm_head" not in text
