"""A multimodal model that is no causal model of text is refused before the first step."""

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText

from benchmarks.tiny_families import VOCABULARY, tiny_config
from kit.data.feed.data_ranks import Ranks
from kit.model.layers.loss_head import install_loss_head
from kit.strategy.accelerator import Prepared
from kit.system.errors import UserError
from kit.train.checks.causality import check_causality


def check(family):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(family))
    install_loss_head(model.train())
    check_causality(Prepared(Accelerator(cpu=True), Ranks(), model, None, None), VOCABULARY)
    assert model.training


@pytest.mark.parametrize(
    ("family", "found"), [("paligemma", "lets tokens attend to later ones"), ("blip-2", "fails on a text alone")]
)
def test_it_is_refused_by_what_it_computes(family, found):
    with pytest.raises(UserError, match=found):
        check(family)


def test_a_causal_one_is_accepted():
    check("qwen2_vl")
