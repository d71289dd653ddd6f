"""Frozen parameters do not train and keep their bits; a pattern that matches nothing is refused."""

import pytest
import torch
from model_helpers import BF16, build, on_meta, problems
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kit.config.settings.method import MethodSettings
from kit.model.adapters.adapter import check_adapter


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


@pytest.mark.parametrize("is_saved", [False, True])
def test_an_adapter_follows_the_weight_that_it_adapts_whatever_happens_to_the_bias(is_saved, recipe, changed, tmp_path):
    folder = changed(attention_bias=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    mine = recipe(folder, lora_target_modules=["q_proj"])
    if is_saved:
        build(mine, BF16).save_pretrained(tmp_path / "adapter")
        mine = recipe(folder, adapter_name_or_path=str(tmp_path / "adapter"))
    for patterns, num_layers in ((["*.[01].*.q_proj.weight"], 1), (["*.q_proj.bias"], 3)):
        model = build(mine.model_copy(update={"freeze": patterns}), BF16)
        assert sum(p.requires_grad for name, p in model.named_parameters() if "lora_A" in name) == num_layers


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_projector_without_linear_layers_is_refused_with_the_method_that_trains_it(method):
    mine = MethodSettings(model_name_or_path="m", method=method, train_only="projector")
    (problem,) = check_adapter(mine, on_meta("gemma3"))
    assert str(problem) == (
        "train_only: no module of lora_target_modules is left to adapt; expected a part with linear modules\n"
        "    -> --method full trains it as it is"
    )
