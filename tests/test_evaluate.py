"""Evaluation is a sum over all supervised tokens, each sample once, on any number of ranks and in any batch size."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from data_helpers import open_recipe_data
from torch import nn

from kit import evaluate as evaluate_module
from kit.config.recipe import Recipe
from kit.data.feed.ranks import Ranks
from kit.data.open import prompt_and_reference
from kit.data.samples.samples import Samples
from kit.evaluate import evaluate
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.own_metric import MetricError
from kit.run.answers import unasked
from kit.strategy.accelerator import Prepared

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


class InTurn:
    """One rank after another; ``total`` is what all of them have given to be summed."""

    def __init__(self, monkeypatch, count=1):
        self.count, self.rank = count, 0
        self.total, self.calls = [], {}
        self.num_gathers, self.gathered = {}, {}
        monkeypatch.setattr(evaluate_module, "gather_object", self.gather)
        monkeypatch.setattr(evaluate_module, "generating", self.generating)

    def prepared(self, model):
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        return Prepared(accelerator, Ranks(self.rank, self.count, self.sum), model, None, None)

    def sum(self, tensor):
        self.total.append(tensor.clone())
        # A rank alone may have counted nothing; together they never have.
        return tensor.clamp(min=1) if self.count > 1 else tensor

    def gather(self, items):
        """Those of the ranks so far; the last rank gets what each would get."""
        number = self.num_gathers[self.rank] = self.num_gathers.get(self.rank, 0) + 1
        of_all = self.gathered.setdefault(number, [])
        of_all += items
        return of_all

    def generating(self, accelerator, model):
        self.calls[self.rank] = 0

        def generate(**kwargs):
            self.calls[self.rank] += 1
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            return model.generate(**kwargs)

        return nullcontext(generate)


@pytest.fixture
def run(setting, monkeypatch):
    """Evaluates on each of ``processes`` ranks in turn; returns them and the results."""

    def run(processes=1, num=61, model=setting.model, samples=None, **changes):
        ranks, results = InTurn(monkeypatch, processes), []
        samples = samples or setting.samples.select(torch.arange(num).numpy(), "first")
        for ranks.rank in range(processes):
            recipe = setting.recipe.model_copy(update=changes)
            given = ranks.prepared(model), recipe, recipe.eval_batch_size, setting.tokenizer, samples
            results.append(evaluate(*given, train_on=recipe.train_on, seed=recipe.seed))
        return ranks, results

    return run


def by_hand(setting, num):
    """Loss in nats summed over all supervised tokens, one sample after another, and their number."""
    total, count = 0.0, 0
    setting.model.eval()
    for i in range(num):
        tokens, weights = setting.samples[i]
        ids = torch.from_numpy(tokens).long()[None]
        with torch.no_grad():
            logits = setting.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double()
        supervised = torch.from_numpy(weights).bool()[1:]
        total += F.cross_entropy(logits[:-1][supervised], ids[0, 1:][supervised], reduction="sum").item()
        count += int(supervised.sum())
    return total, count


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_the_loss_is_the_mean_over_all_supervised_tokens(setting, run, batch):
    total, count = by_hand(setting, 61)
    _, (result,) = run(per_device_eval_batch_size=batch)
    assert result.metrics["eval_tokens"] == count
    assert result.metrics["eval_loss"] == pytest.approx(total / count, rel=1e-6)
    assert result.metrics["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "num", "batch"), [(3, 61, 2), (4, 1, 1), (3, 7, 2)])
def test_each_sample_counts_once_on_any_number_of_ranks(setting, run, processes, num, batch):
    total, count = by_hand(setting, num)
    ranks, results = run(processes, num, per_device_eval_batch_size=batch)
    (loss_sum,) = sum(ranks.total).tolist()
    assert {result.metrics["eval_tokens"] for result in results} == {count}
    assert loss_sum == pytest.approx(total, rel=1e-6)


def test_the_batch_size_of_evaluations_is_that_of_training_unless_it_is_given(run, setting):
    seen = []
    handle = setting.model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    try:
        run(num=6, per_device_train_batch_size=2)
        run(num=6, per_device_train_batch_size=2, per_device_eval_batch_size=3)
    finally:
        handle.remove()
    assert seen == [2, 2, 2, 3, 3]


def test_it_measures_without_dropout_and_leaves_training_as_it_was(setting, run):
    dropouts = [module for module in setting.model.modules() if isinstance(module, nn.Dropout)]
    setting.model.train()
    setting.model.add_module("extra", nn.Dropout(0.5))
    seen = []
    setting.model.extra.register_forward_pre_hook(lambda module, inputs: seen.append(module.training))
    handle = setting.model.register_forward_pre_hook(lambda module, inputs: module.extra(torch.ones(1)) and None)
    try:
        run(num=3)
        assert seen and not any(seen)
        assert setting.model.training and all(module.training for module in dropouts)
        setting.model.eval()
        run(num=3)
        assert not setting.model.training
    finally:
        handle.remove()
        del setting.model.extra


def test_a_hopeless_loss_still_has_a_perplexity(setting, run, monkeypatch):
    _, (result,) = run(num=2, model=_Knowing(setting, {}, loss=1e9))
    assert math.isfinite(result.metrics["eval_perplexity"])


class _Knowing(nn.Module):
    """Answers with the text it was given for a prompt, whatever the padding."""

    def __init__(self, setting, answers, loss=1.0):
        super().__init__()
        self.stops = set()  # the ids that end an answer, of all calls
        self.ends = True  # whether it writes one of them
        self.setting, self.answers, self.loss = setting, answers, loss

    def forward(self, targets, **inputs):
        return torch.tensor(self.loss)

    def generate(self, input_ids, attention_mask, max_new_tokens, pad_token_id, eos_token_id, do_sample, **options):
        assert not do_sample
        self.stops.update(eos_token_id)
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.tolist() == sorted(mask.tolist()), "padded on the right"
            answer = self.answers[tuple(ids[mask.bool()].tolist())]
            rows.append([*answer, eos_token_id[0]] if self.ends else [*answer, *[5] * max_new_tokens])
        width = min(max_new_tokens, max(map(len, rows)))
        rows = [(row + [pad_token_id] * width)[:width] for row in rows]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)


@pytest.fixture
def knowing(setting):
    """Knows the answers to all samples but the ``wrong`` ones."""

    def knowing(wrong, wrong_text=" no idea"):
        answers = {}
        for i in range(len(setting.samples)):
            prompt, reference = prompt_and_reference(setting.samples, i)
            text = setting.tokenizer.decode(reference, skip_special_tokens=True)
            text = wrong_text if i in wrong else f" {text}\n"  # space around an answer is no mistake
            answers[tuple(prompt)] = setting.tokenizer(text, add_special_tokens=False).input_ids
        return _Knowing(setting, answers)

    return knowing


@pytest.mark.parametrize(("processes", "batch"), [(1, 1), (1, 5), (3, 5), (4, 61)])
def test_metrics_of_answers_are_means_over_all_samples(run, knowing, tmp_path, processes, batch):
    """Also one of the user's, which gets the row of each answer."""
    path = tmp_path / "own_of_rows.py"
    path.write_text(
        "def f(expected, answer, row):\n    return row['messages'][-1]['content'].strip() == answer.strip()\n"
    )
    metrics = {"metrics": ["token_f1", f"{path}:f"], "predict_with_generate": True, "max_new_tokens": 500}
    model = knowing(wrong={0, 3, 7, 31, 59}, wrong_text="red 1")
    _, results = run(processes, model=model, per_device_eval_batch_size=batch, **metrics)
    found = results[-1].metrics
    assert found["eval_exact_match"] == found["eval_f"] == 56 / 61 < found["eval_token_f1"] < 1
    low, high = results[-1].intervals["eval_exact_match"]
    assert 0.8 < low < 56 / 61 < high < 1 and "eval_number" not in found


def test_a_metric_that_fails_names_the_first_row_on_all_ranks(run, knowing, tmp_path):
    path = tmp_path / "own_that_fails.py"
    path.write_text("def f(expected, answer, row):\n    return None if 'no idea' in answer else 1\n")
    with pytest.raises(MetricError, match=r"own_that_fails.py:1: f returned None \(row \S+:4, "):
        run(1, model=knowing(wrong={3, 31}), predict_with_generate=True, metrics=[f"{path}:f"], max_new_tokens=500)


@pytest.mark.slow
def test_drawn_answers_do_not_depend_on_ranks_and_batches(setting, run):
    drawn = {"predict_with_generate": True, "temperature": 1.5, "top_p": 0.9, "num_return_sequences": 2}
    drawn |= {"max_new_tokens": 8, "metrics": ["token_f1"]}
    found = []
    for processes, batch, seed in ((1, 1, 1), (3, 2, 1), (1, 1, 2)):
        _, results = run(processes, 6, per_device_eval_batch_size=batch, seed=seed, **drawn)
        found.append([answer.text for answer in results[-1].answers])
        assert {"eval_token_f1", "eval_token_f1/best@2", "eval_exact_match/pass@2"} <= set(results[-1].metrics)
    assert found[0] == found[1] != found[2] and results[-1].counts["num_answers"] == 12


def test_an_answer_ends_with_eos_or_with_the_token_that_ends_the_reference(setting, run, knowing):
    """Many chat templates end a turn with a token of their own."""
    model, eos = knowing(wrong=()), setting.tokenizer.eos_token
    try:
        setting.tokenizer.eos_token = "<|endoftext|>"
        run(num=3, model=model, predict_with_generate=True)
    finally:
        setting.tokenizer.eos_token = eos
    assert model.stops == {0, 2}  # <|endoftext|>, and <|im_end|> of the template


def test_an_answer_cut_off_is_wrong(run, knowing):
    _, (result,) = run(model=knowing(wrong=()), predict_with_generate=True, max_new_tokens=2)
    assert result.metrics["eval_exact_match"] < 0.2


def test_answers_that_do_not_end_are_counted_where_the_expected_one_fits(setting, run, knowing):
    model = knowing(wrong=())
    model.ends = False
    _, (result,) = run(model=model, predict_with_generate=True, max_new_tokens=500)
    assert result.counts["num_unended_answers"] == 61
    model.ends = True
    _, (result,) = run(model=model, predict_with_generate=True, max_new_tokens=500)
    assert result.counts["num_unended_answers"] == 0 and result.stops == ["<|im_end|>"]
    model.ends = False
    _, (result,) = run(model=model, predict_with_generate=True, max_new_tokens=1)
    assert result.counts["num_unended_answers"] == 0  # no expected answer is so short


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_to_samples_that_ask_nothing_no_answers_are_generated(setting, run, knowing, monkeypatch, train_on):
    sequences = Samples.sequences

    def learned_from_the_start(samples, i):
        [(ids, weights)] = sequences(samples, i)
        return [(ids, weights if train_on == "all" or i != 1 else np.ones_like(weights))]

    monkeypatch.setattr(Samples, "sequences", learned_from_the_start)
    _, (result,) = run(model=knowing(()), num=3, predict_with_generate=True, train_on=train_on)
    asked = 2 if train_on == "assistant" else 0
    assert result.counts["num_unasked_samples"] == 3 - asked and result.counts.get("num_answers", 0) == asked
    assert ("eval_exact_match" in result.metrics) == bool(asked)
    assert unasked(result.counts)[0].startswith(f"{3 - asked} samples ask nothing")


def test_every_rank_generates_equally_often(run, knowing):
    """Where weights are sharded each call gathers them: a rank that calls less often lets the others wait for ever."""
    for processes, num, batch in [(3, 7, 2), (4, 1, 3), (2, 61, 4)]:
        ranks, _ = run(processes, num, knowing(()), predict_with_generate=True, per_device_eval_batch_size=batch)
        assert len(ranks.calls) == processes
        assert len(set(ranks.calls.values())) == 1


def test_the_first_few_samples_are_shown_with_their_texts(setting, run, knowing):
    _, (result,) = run(model=knowing(wrong={1}), predict_with_generate=True, per_device_eval_batch_size=3)
    assert [answer.exact for answer in result.answers] == [True, False, True]
    for i, answer in enumerate(result.answers):
        prompt, reference = prompt_and_reference(setting.samples, i)
        assert answer.prompt == setting.tokenizer.decode(prompt) and "<|im_start|>assistant" in answer.prompt
        assert answer.reference == setting.tokenizer.decode(reference, skip_special_tokens=True)
        assert "<|im_end|>" not in answer.reference + answer.text
    assert result.answers[1].text.strip() == "no idea"


@pytest.mark.slow
def test_padding_does_not_change_greedy_answers(setting, run, monkeypatch):
    """A real model, prompts of very different lengths: alone, and padded on the left in a batch."""
    monkeypatch.setattr(evaluate_module, "NUM_SHOWN", 24)
    answers = {}
    for batch in (1, 5, 24):
        _, (result,) = run(num=24, predict_with_generate=True, per_device_eval_batch_size=batch, max_new_tokens=12)
        answers[batch] = [answer.text for answer in result.answers]
    assert len(set(answers[1])) > 12  # the prompt matters
    assert answers[5] == answers[1] and answers[24] == answers[1]


@pytest.mark.slow
def test_real_ranks_agree_with_one_process(finetune, fp32, chat_file, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text("".join(line + "\n" for line in chat_file.read_text().splitlines()[:7]))
    flags = {
        "eval_dataset": odd,
        "eval_on_start": True,
        "predict_with_generate": True,
        "max_new_tokens": 4,
        "max_steps": 1,
        "method": "lora",
        "global_batch_size": 6,
        "per_device_train_batch_size": 1,
    }

    def evaluations(name, processes, config):
        run = finetune.ok(name, processes, config=fp32[config], **flags)
        return [row for row in run.rows if "eval_loss" in row]

    expected = evaluations("one", 1, "single")
    assert [row["step"] for row in expected] == [0, 1]
    for name, processes, config in [("two", 2, "fsdp"), ("three", 3, "ddp")]:
        for ours, theirs in zip(evaluations(name, processes, config), expected, strict=True):
            assert ours["eval_tokens"] == theirs["eval_tokens"]
            assert ours["eval_exact_match"] == theirs["eval_exact_match"]
            assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6), name


def test_a_loss_that_is_not_finite_is_said(setting, run):
    class Overflowing(nn.Module):
        def forward(self, **inputs):
            return setting.model(**inputs) * math.nan

    _, (result,) = run(1, 8, Overflowing())
    assert result.doubts()[0].startswith("eval_loss is nan: this evaluation is not the best")
    assert run(1, 8)[1][0].doubts() == []
