"""What a recipe freezes does not train and has the compute type; a pattern that chooses nothing is refused."""

import pytest
import torch
from helpers import make_model
from model_helpers import BF16, build, problems


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"freeze": "model.embed_tokens*,model.layers.[01].*"}, ("model.layers.2.", "model.norm.", "lm_head.")),
        ({"train_only": "model.layers.2.*,lm_head.weight"}, ("model.layers.2.", "lm_head.")),
    ],
)
def test_patterns_select_what_trains_and_the_rest_has_the_compute_dtype(recipe, settings, trained):
    settings = recipe(method="full", **settings)
    assert problems(settings) == ""
    for name, parameter in build(settings, BF16).named_parameters():
        trains = name.startswith(trained)
        assert parameter.requires_grad == trains, name
        assert parameter.dtype == (torch.float32 if trains else torch.bfloat16), name


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("embed_tokens*", "did you mean '*embed_tokens*'?"),
        ("model.norm", "did you mean 'model.norm*'?"),
        ("norm.weight", "did you mean '*norm.weight'?"),
        ("model.layer.0.*", "did you mean 'model.layers.0.*'?"),
        ("vision_tower.*", ""),
    ],
)
@pytest.mark.parametrize("field", ["freeze", "train_only"])
def test_a_pattern_that_matches_nothing_is_refused_with_one_that_does(recipe, field, pattern, hint):
    text = problems(recipe(method="full", **{field: f"lm_head.*,{pattern}"}))
    assert f"{field}: {pattern!r} matches no parameter; expected a pattern such as" in text and "lm_head" not in text
    assert text.partition("-> ")[2] == hint


def test_freezing_every_parameter_is_refused(recipe):
    assert "freeze: nothing is left to train" in problems(recipe(method="full", freeze="model.*,lm_head*"))
    assert problems(recipe(method="full", train_only="*")) == ""


def test_a_tied_weight_is_matched_by_either_of_its_names(recipe, tmp_path):
    folder = make_model(tmp_path / "tied", tie_word_embeddings=True)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        settings = recipe(folder, method="full", freeze=name)
        assert problems(settings) == ""
        assert not build(settings, BF16).get_output_embeddings().weight.requires_grad
