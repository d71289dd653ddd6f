"""What a recipe freezes does not train and keeps its bits; a pattern that chooses nothing is refused."""

import pytest
import torch
from model_helpers import BF16, build, problems
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"freeze": "model.embed_tokens*,model.layers.[01].*"}, ("model.layers.2.", "model.norm.", "lm_head.")),
        ({"train_only": "model.layers.2.*,lm_head.weight"}, ("model.layers.2.", "lm_head.")),
    ],
)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_patterns_select_what_trains_and_the_rest_keeps_its_bits(
    recipe, model_folder, tmp_path, settings, trained, stored
):
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


def test_a_pattern_that_matches_nothing_is_refused_with_one_that_does(recipe):
    cases = [
        ("embed_tokens*", "did you mean '*embed_tokens*'?"),
        ("model.norm", "did you mean 'model.norm*'?"),
        ("norm.weight", "did you mean '*norm.weight'?"),
        ("model.layer.0.*", "did you mean 'model.layers.0.*'?"),
        ("vision_tower.*", ""),
    ]
    for pattern, hint in cases:
        for field in ["freeze", "train_only"]:
            case = pattern, hint, field
            text = problems(recipe(method="full", **{field: f"lm_head.*,{pattern}"}))
            assert (
                f"{field}: {pattern!r} matches no parameter; expected a pattern such as" in text
                and "lm_head" not in text
            ), case
            assert text.partition("-> ")[2] == hint, case
