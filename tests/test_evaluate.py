"""Evaluation is a sum over all supervised tokens, each sample once, on any number of ranks and in any batch size."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data
from torch import nn

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.data.samples.samples import Samples
from kit.evaluate import evaluate
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.rollouts.generation import CACHE
from kit.run.generation_warnings import missing_prompts
from kit.scoring.own_metric import MetricError
from kit.tasks.objectives import build_objective
from kit.train.policy import Policy

torch.set_num_threads(1)  # for models so small, more of them only wait for each other


@pytest.fixture(scope="module")
def setting(model_folder, chat_file):
    """Model, tokenizer and 61 samples."""
    recipe = Recipe(model_name_or_path=str(model_folder), dataset=str(chat_file), max_length=256, method="lora")
    tokenizer = open_tokenizer(recipe)
    model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"), seed=recipe.seed)
    with torch.no_grad():  # of different lengths for different prompts
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return SimpleNamespace(
        recipe=recipe,
        tokenizer=tokenizer,
        model=model,
        samples=open_recipe_data(recipe, tokenizer, 320).train,
    )


@pytest.fixture
def run(setting):
    """Evaluates the first ``num`` samples in this process; returns the result."""

    def run(num=61, model=setting.model, **changes):
        samples = setting.samples.select(np.arange(num), "first")
        recipe = setting.recipe.model_copy(update=changes)
        policy = Policy(Accelerator(cpu=True), Ranks(), model, None, None, tokenizer=setting.tokenizer)
        data = SimpleNamespace(evaluation=samples, mismatched=lambda samples: None)
        return evaluate(policy, build_objective(recipe, samples.dataset_names), data, recipe)

    return run


def test_it_measures_without_dropout_and_leaves_training_as_it_was(setting, run):
    seen = []
    handle = setting.model.register_forward_pre_hook(lambda module, inputs: seen.append(module.training))
    try:
        for is_training in (True, False):
            setting.model.train(is_training)
            run(num=3)
            assert setting.model.training is is_training and seen and not any(seen)
    finally:
        handle.remove()


class _Knowing(nn.Module):
    """Answers with the text it was given for a prompt, whatever the padding."""

    def __init__(self, config, answers):
        super().__init__()
        self.stops = set()  # the ids that end an answer, of all calls
        self.ends = True  # whether it writes one of them
        self.config, self.answers = config, answers

    def forward(self, targets, **inputs):
        return torch.tensor(1.0)

    def generate(
        self, input_ids, attention_mask, max_new_tokens, pad_token_id, do_sample, eos_token_id=None, **options
    ):
        assert not do_sample and not torch.backends.cuda.cudnn_sdp_enabled()
        if eos_token_id is None:  # of the prompts alone: it has no keys and values
            return {CACHE: None}
        self.stops.update(eos_token_id)
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.tolist() == sorted(mask.tolist()), "padded on the right"
            answer = self.answers[tuple(ids[mask.bool()].tolist())]
            rows.append([*answer, eos_token_id[0]] if self.ends else [*answer, *[5] * max_new_tokens])
        width = min(max_new_tokens, max(map(len, rows)))
        rows = [(row + [pad_token_id] * width)[:width] for row in rows]
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor(rows)], dim=1))


@pytest.fixture
def knowing(setting):
    """Knows the answers to all samples but the ``wrong`` ones."""

    def knowing(wrong, wrong_text=" no idea"):
        answers = {}
        for i in range(len(setting.samples)):
            prompt, reference = setting.samples.prompt(i)
            text = setting.tokenizer.decode(reference, skip_special_tokens=True)
            text = wrong_text if i in wrong else f" {text}\n"  # space around an answer is no mistake
            answers[tuple(prompt)] = setting.tokenizer(text, add_special_tokens=False).input_ids
        return _Knowing(setting.model.config, answers)

    return knowing


def test_metrics_of_answers_are_means_over_all_samples(run, knowing, tmp_path):
    """Also one of the user's, which gets the row of each answer."""
    path = tmp_path / "own_of_rows.py"
    path.write_text(
        "def f(expected, answer, row):\n    return row['messages'][-1]['content'].strip() == answer.strip()\n"
    )
    metrics = {"metrics": ["token_f1", f"{path}:f"], "predict_with_generate": True, "max_new_tokens": 500}
    model = knowing(wrong={0, 3, 7, 31, 59}, wrong_text="red 1")
    result = run(model=model, per_device_eval_batch_size=5, **metrics)
    found = result.metrics
    assert found["eval_exact_match"] == found["eval_f"] == 56 / 61 < found["eval_token_f1"] < 1
    low, high = result.intervals["eval_exact_match"]
    assert 0.8 < low < 56 / 61 < high < 1 and "eval_number" not in found


def test_a_metric_that_fails_names_the_first_row(run, knowing, tmp_path):
    path = tmp_path / "own_that_fails.py"
    path.write_text("def f(expected, answer, row):\n    return None if 'no idea' in answer else 1\n")
    with pytest.raises(MetricError, match=r"own_that_fails.py:1: f returned None \(row \S+:4, "):
        run(model=knowing(wrong={3, 31}), predict_with_generate=True, metrics=[f"{path}:f"], max_new_tokens=500)


@pytest.mark.slow
def test_drawn_answers_depend_on_the_seed_and_not_on_batches(run):
    drawn = {"predict_with_generate": True, "temperature": 1.5, "top_p": 0.9, "num_return_sequences": 2}
    drawn |= {"max_new_tokens": 8, "metrics": ["token_f1"]}
    results = [run(6, per_device_eval_batch_size=batch, seed=seed, **drawn) for batch, seed in ((1, 1), (4, 1), (1, 2))]
    found = [[answer.text for answer in result.answers] for result in results]
    assert found[0] == found[1] != found[2] and results[0].counts["num_answers"] == 12
    assert {"eval_token_f1", "eval_token_f1/best@2", "eval_exact_match/pass@2"} <= set(results[0].metrics)


def test_an_answer_ends_with_eos_or_with_the_token_that_ends_the_reference(setting, run, knowing):
    """Many chat templates end a turn with a token of their own."""
    model, eos = knowing(wrong=()), setting.tokenizer.eos_token
    try:
        setting.tokenizer.eos_token = "<|endoftext|>"
        run(num=3, model=model, predict_with_generate=True)
    finally:
        setting.tokenizer.eos_token = eos
    assert model.stops == {0, 2}  # <|endoftext|>, and <|im_end|> of the template


def test_answers_that_do_not_end_are_counted_where_the_expected_one_fits(run, knowing):
    model = knowing(wrong=())
    for ends, max_new_tokens, num_truncated in [(True, 500, 0), (False, 500, 61), (False, 1, 0)]:
        model.ends = ends  # no expected answer is as short as one token
        result = run(model=model, predict_with_generate=True, max_new_tokens=max_new_tokens)
        assert result.counts["num_truncated_answers"] == num_truncated and result.stops == ["<|im_end|>"]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_to_samples_that_ask_nothing_no_answers_are_generated(run, knowing, monkeypatch, train_on):
    def second_is_learned_from_the_start(samples):
        spans = samples.values[:, :2].astype(np.int64)
        spans[1, 0] *= train_on == "all"
        return spans

    monkeypatch.setattr(Samples, "answer_spans", property(second_is_learned_from_the_start))
    result = run(model=knowing(()), num=3, predict_with_generate=True, train_on=train_on)
    asked = 2 if train_on == "assistant" else 0
    assert result.counts["num_samples_without_prompt"] == 3 - asked and result.counts.get("num_answers", 0) == asked
    assert ("eval_exact_match" in result.metrics) == bool(asked)
    assert missing_prompts(result.counts)[0].startswith(f"{3 - asked} samples have no prompt")


def test_the_first_few_samples_are_shown_with_their_texts(setting, run, knowing):
    first, second, third = run(model=knowing(wrong={1}), predict_with_generate=True).answers
    assert [first.exact, second.exact, third.exact] == [True, False, True] and second.text.strip() == "no idea"
    prompt, reference = setting.samples.prompt(1)
    assert second.prompt == setting.tokenizer.decode(prompt)
    assert second.reference == setting.tokenizer.decode(reference, skip_special_tokens=True)


def test_a_loss_that_is_not_finite_is_said_with_the_lines_of_its_micro_batch(setting, run):
    one = torch.from_numpy(setting.samples[5][0]).long()

    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, **inputs):
            is_there = torch.equal(inputs["input_ids"][0, : len(one)], one)
            return setting.model(**inputs) * (self.factor if is_there else 1.0)

    result = run(8, Times(math.nan), per_device_eval_batch_size=1)
    assert result.odd_samples == [setting.samples.origin(5)]
    (doubt,) = result.doubts()
    assert doubt.startswith(f"eval_loss is nan: NaN/Inf in the micro-batches of {setting.samples.origin(5)};")
    hopeless = run(8, Times(1e9), per_device_eval_batch_size=1)
    assert hopeless.doubts() == [] and math.isfinite(hopeless.metrics["eval_perplexity"])
