"""Pairs and answers with a label are checked for what misleads an objective, and what is right is reported as right."""

import re

import numpy as np
import pytest
from data_helpers import open_all, write
from report_helpers import checks, looked

from kit.tools.report.preference_checks import _differ_in_one, answer_lengths

DPO, KTO = {"objective": "dpo"}, {"objective": "kto"}


def pair(prompt, chosen, rejected):
    return {"prompt": f"{prompt}:", "chosen": f" {chosen}", "rejected": f" {rejected}"}


def rated(prompt, completion, label):
    return {"prompt": f"{prompt}:", "completion": f" {completion}", "label": label}


def found(gathered, words):
    """The check whose text holds ``words``, and its verdict."""
    (check,) = (check for check in checks(gathered).items() if words in check[0])
    return check


def lines_of(gathered, key):
    return sorted({s.origin.partition(":")[2] for s in gathered.shown.samples if key in s.reasons})


@pytest.mark.parametrize(
    ("num_longer", "num_shorter", "verdict"), [(20, 0, "look"), (0, 20, "look"), (14, 10, "note"), (19, 0, "note")]
)
def test_a_bias_in_length_is_reported(num_longer, num_shorter, verdict, tmp_path, tokenizer):
    rows = [pair(f"Q{i}", "ab ab ab", "ab") for i in range(num_longer)]
    rows += [pair(f"R{i}", "ab", "ab ab ab") for i in range(num_shorter)]
    write(tmp_path / "train.jsonl", *rows)
    data = open_all(tokenizer, **DPO)
    lengths = answer_lengths(data.train)
    text, actual = found(looked(tokenizer, **DPO), "the chosen answer is longer in")
    share = num_longer / (num_longer + num_shorter)
    assert f"longer in {share:.1%} of the pairs and shorter in {1 - share:.1%}" in text and actual == verdict
    assert f": {np.mean(lengths['chosen']):.1f} tokens on average, {np.mean(lengths['rejected']):.1f} the rej" in text


def test_the_length_of_an_answer_is_without_its_prompt(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("a very long prompt", "xyz", "xyzzy"))
    lengths = answer_lengths(open_all(tokenizer, **DPO).train)
    ends = [len(tokenizer(text).input_ids) + 1 for text in (" xyz", " xyzzy")]  # and the token that ends it
    assert [lengths["chosen"].tolist(), lengths["rejected"].tolist()] == [[ends[0]], [ends[1]]]


def test_answers_that_nearly_agree_are_reported_unless_they_are_short(tmp_path, tokenizer):
    rows = [pair("Q1", "0123456789", "0123x56789"), pair("Q2", "1", "2"), pair("Q3", "0123456789", "xx23456789")]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, **DPO)
    text, verdict = found(gathered, "in one token alone")
    assert text.startswith("1 of 3 pairs differ in one token alone") and verdict == "note"
    assert lines_of(gathered, "nearly-same") == ["1"]
    write(tmp_path / "train.jsonl", *rows[1:])
    assert found(looked(tokenizer, **DPO), "in one token alone")[1] == "ok"


def test_one_token_is_replaced_put_in_or_left_out():
    cases = [
        ([1, 2, 3], [1, 9, 3], True),
        ([1, 2, 3], [1, 3], True),
        ([1, 3], [1, 2, 3], True),
        ([1, 2], [1, 2, 3], True),
        ([1, 1, 2], [1, 2], True),
        ([1, 2, 3], [9, 2, 9], False),
        ([1, 2, 3], [3, 2], False),
        ([1, 2, 3, 4], [1, 2], False),
        ([1, 2, 3], [1, 3, 2], False),
    ]
    for first, second, expected in cases:
        assert _differ_in_one(np.array(first), np.array(second)) == expected, (first, second, expected)


def test_pairs_that_contradict_each_other_are_named(tmp_path, tokenizer):
    rows = [pair("Q", "yes", "no"), pair("Q", "yes", "maybe"), pair("P", "no", "yes"), pair("Q", "no", "yes")]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, **DPO)
    text, verdict = found(gathered, "the other way round")
    assert text == (
        "2 pairs contradict each other, chosen and rejected the other way round: train.jsonl:1, train.jsonl:4"
    )
    assert verdict == "look" and lines_of(gathered, "both-ways") == ["1", "4"]
    write(tmp_path / "train.jsonl", *rows[:3], rows[0])  # the same pair twice is no contradiction
    gathered = looked(tokenizer, **DPO)
    assert found(gathered, "the other way round")[1] == "ok" and lines_of(gathered, "repeated") == ["1", "4"]


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_prompt_that_occurs_again_is_counted(objective, tmp_path, tokenizer):
    prompts = ["Q", "P", "Q", "R", "Q", "P"]
    rows = [rated(p, i, i % 2 == 0) if objective == "kto" else pair(p, i, i + 1) for i, p in enumerate(prompts)]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, objective=objective)
    text, verdict = found(gathered, "prompts; one of them has")
    noun = "answers" if objective == "kto" else "pairs"
    assert text == f"6 {noun} have 3 prompts; one of them has 3" and verdict == "note"
    assert lines_of(gathered, "same-prompt") == ["1", "3", "5"], "those of the most frequent prompt are shown"
    write(tmp_path / "train.jsonl", *rows[:2])
    assert checks(looked(tokenizer, objective=objective))[f"no two {noun} have the same prompt"] == "ok"


@pytest.mark.parametrize(
    ("num_true", "num_false", "weights", "fix"),
    [
        (5, 5, {}, None),
        (6, 4, {}, None),  # the number of good ones may be 1.5 times as large
        (2, 8, {}, "--desirable_weight 4"),
        (2, 8, {"undesirable_weight": 3.0}, "--desirable_weight 12"),
        (8, 2, {}, "--undesirable_weight 4"),
        (2, 8, {"desirable_weight": 4.0}, None),
    ],
)
def test_labels_out_of_balance_get_the_weight_that_balances_them(
    num_true, num_false, weights, fix, tmp_path, tokenizer
):
    labels = [True] * num_true + [False] * num_false
    write(tmp_path / "train.jsonl", *(rated(f"Q{i}", i, label) for i, label in enumerate(labels)))
    text, verdict = found(looked(tokenizer, **KTO, **weights), "have the label true")
    assert text.startswith(f"{num_true * 10}.0% of the answers") and verdict == ("look" if fix else "ok")
    assert (f"; {fix} makes it 1" in text) if fix else "makes it" not in text
    if fix:  # typed, it is enough
        name, value = re.fullmatch("--(\\w+) (\\d+)", fix).groups()
        assert found(looked(tokenizer, **KTO, **{**weights, name: float(value)}), "have the label true")[1] == "ok"


def test_labels_of_one_kind_are_reported(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(rated(f"Q{i}", i, False) for i in range(3)))
    gathered = looked(tokenizer, **KTO)
    assert checks(gathered)["all 3 answers have the label false: kto learns from both kinds"] == "look"
    assert list(gathered.answer_lengths) == ["label false"]


def test_the_same_answer_with_both_labels_is_a_contradiction_and_no_repetition(tmp_path, tokenizer):
    rows = [rated("Q", "yes", True), rated("Q", "no", False), rated("Q", "yes", False), rated("P", "yes", True)]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, **KTO)
    text = "2 samples contradict each other, the same answer with both labels: train.jsonl:1, train.jsonl:3"
    assert checks(gathered)[text] == "look" and lines_of(gathered, "both-labels") == ["1", "3"]
    assert checks(gathered)["no sample occurs twice"] == "ok"
    write(tmp_path / "train.jsonl", *rows[:2], rows[0])
    found_checks = checks(looked(tokenizer, **KTO))
    assert found_checks["no answer has both labels"] == "ok"
    assert found_checks["2 samples are the same: train.jsonl:1, train.jsonl:3"] == "look"


def test_samples_of_other_objectives_have_none_of_these_checks(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"prompt": "Q:", "completion": " yes"})
    gathered = looked(tokenizer)
    assert not [text for text in checks(gathered) if "pair" in text or "label" in text or "prompts" in text]
    assert gathered.answer_lengths == {}


def test_of_very_many_pairs_it_says_how_many_were_compared(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.preference_checks.MAX_COMPARED", 5)
    write(tmp_path / "train.jsonl", *(pair(f"Q{i}", "yes", "no") for i in range(9)))
    found_checks = checks(looked(tokenizer, **DPO))
    for text in ("no pair occurs the other way round too", "no two pairs have the same prompt"):
        assert found_checks[f"{text}, of the 5 that were compared"] == "ok"
