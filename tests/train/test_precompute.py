"""Cached reference log-probabilities are found again, and never those of other weights or data."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data, preference_pairs, write
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.cache import cache_folder
from kit.system.errors import TrainingError
from kit.train.policy import Policy
from kit.train.precompute import FOLDER, add_references


@pytest.fixture
def run(model_folder, tmp_path, monkeypatch):
    """A function of settings that adds references to data; it counts the calls of the model."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "pairs.jsonl", *preference_pairs(10))
    write(tmp_path / "eval.jsonl", *preference_pairs(3, "b"))

    def run(total_steps=5, spoil=None, compiler=None, **changes):
        plain = {"model_name_or_path": str(model_folder), "dataset": str(tmp_path / "pairs.jsonl"), "method": "full"}
        recipe = Recipe(**plain | {"objective": "dpo", "max_length": 128, "global_batch_size": 2} | changes)
        tokenizer = open_tokenizer(recipe)
        data = open_recipe_data(recipe, tokenizer, 320)
        model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
        calls = []
        model.register_forward_hook(lambda *_: calls.append(1))
        if spoil:
            spoil(model)
        strategy = actual_strategy(sharded_layers=None)
        policy = Policy(Accelerator(cpu=True), Ranks(), model, None, strategy, tokenizer=tokenizer, compiler=compiler)
        add_references(policy, recipe, data, total_steps, lambda items, *_: items)
        return SimpleNamespace(data=data, train=data.train.attached["sequence"]["references"], num_calls=len(calls))

    return run


def entries():
    return sorted(path for path in (cache_folder() / FOLDER).iterdir() if path.is_dir())


def test_they_are_computed_once_and_found_again(run, tmp_path):
    first = run(eval_dataset=str(tmp_path / "eval.jsonl"))
    again = run(eval_dataset=str(tmp_path / "eval.jsonl"), learning_rate=1e-3, beta=0.5, seed=0)
    assert (first.num_calls, again.num_calls) == (13, 0) and len(entries()) == 2
    assert np.array_equal(first.train, again.train) and first.train.shape == (10, 2) and (first.train < 0).all()
    assert np.array_equal(
        first.data.evaluation.attached["sequence"]["references"],
        again.data.evaluation.attached["sequence"]["references"],
    )


def test_only_what_the_steps_use_is_computed(run):
    short = run(total_steps=1)
    assert short.num_calls == 2 and (short.train != 0).all(axis=1).sum() == 2
    assert run(total_steps=2).num_calls == 4  # a longer run needs others, with the weights from which it began


@pytest.mark.parametrize(
    ("change", "computes"),
    [
        ({"max_length": 64}, True),
        ({"method": "lora", "precompute_reference": True}, True),
        ({"attn_implementation": "eager"}, True),
        ({"experts_implementation": "eager"}, True),
        ({"compiler": "any"}, True),
        ({"dpo_loss": "ipo", "num_train_epochs": 2.0}, False),
    ],
    ids=str,
)
def test_what_changes_the_numbers_is_in_the_key(run, change, computes):
    run()
    assert bool(run(**change).num_calls) == computes


def test_other_weights_and_other_data_are_not_mistaken_for_these(run, model_folder, tmp_path):
    before = run()
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    path = other / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # a bit in the middle of the file
    path.write_bytes(bytes(content))
    assert run(model_name_or_path=str(other)).num_calls
    write(tmp_path / "pairs.jsonl", *preference_pairs(10, "c"))
    assert not np.array_equal(run().train, before.train)


def test_a_log_probability_that_is_not_finite_names_its_sample(run):
    def spoil(model):
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"no finite log-probability to 10 of 10 samples, first .*pairs.jsonl:1"):
        run(spoil=spoil)
    assert not (cache_folder() / FOLDER).exists() or not entries()
