"""Which models do not support sequence parallelism, by their config and settings."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.config.recipe import Recipe
from kit.model.layers.sequence_parallel import sequence_problems


@pytest.mark.parametrize(
    ("family", "attention", "router_loss", "message"),
    [
        (
            "nemotron",
            "auto",
            0.0,
            "2, with nemotron, whose layers do not pass sequence bounds to attention; expected 1",
        ),
        ("doge", "auto", 0.0, "2, with doge, whose layers do not pass sequence bounds to attention; expected 1"),
        ("mixtral", "auto", 0.01, "2, with router_aux_loss_coef 0.01, .*\n    -> --router_aux_loss_coef 0"),
        ("llama", "eager", 0.0, "2, with attn_implementation eager; .*\n    -> --attn_implementation auto"),
    ],
)
def test_refusals_by_name(family, attention, router_loss, message):
    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings = Recipe(model_name_or_path="m", dataset="d.jsonl", attn_implementation=attention)
    (problem,) = sequence_problems(2, settings, config, model, router_loss)
    assert re.search(message, str(problem))
    assert not sequence_problems(1, settings, config, model, router_loss)
