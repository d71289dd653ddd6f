"""Metrics of answers are those that their names promise."""

import numpy as np
import pytest

from kit.scoring.metrics import METRICS, Metric, bounds_of, exact_match, number, token_f1


def test_the_last_numbers_are_compared():
    cases = [
        ("so 1,200 cars\n#### 72", "7 + 65 = 72\n#### 72", 1),
        ("It costs $1,234.50.", "#### 1234.5", 1),
        ("72 of 100", "#### 72", 0),
        ("-3", "#### 3", 0),
        ("none", "#### 3", 0),
        ("none", "none", 0),
        ("", "", 0),
    ]
    for answer, expected, value in cases:
        assert number(answer, expected) == value, (answer, expected, value)


def test_words_in_both_texts_count_without_articles_and_punctuation():
    cases = [
        ("The cat sat.", "a cat sat", 1),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0),
        ("", "cat", 0),
        ("the", "A", 1),
    ]
    for answer, expected, value in cases:
        assert token_f1(answer, expected) == pytest.approx(value), (answer, expected, value)


def test_whitespace_at_the_ends_does_not_matter():
    assert exact_match(" yes\n", "yes") == 1 and exact_match("Yes", "yes") == 0


@pytest.mark.parametrize("name", ["chrf", "rouge_l"])
def test_metrics_of_libraries_go_from_0_to_1(name):
    pytest.importorskip({"chrf": "sacrebleu", "rouge_l": "rouge_score"}[name])
    metric = METRICS[name]
    assert metric("the cat sat", "the cat sat") == pytest.approx(1) and metric("xyz", "qrst") == 0
    assert 0 < metric("the cat lay", "the cat sat") < 1


def test_bounds_hold_the_mean_and_are_the_same_at_each_call():
    values = np.array([1.0] * 60 + [0.0] * 40)
    low, high = bounds_of(values, np.mean)
    assert (low, high) == bounds_of(values, np.mean) and 0.49 < low < 0.53 < 0.67 < high < 0.71  # 0.6 +- 1.96 x 0.049
    assert bounds_of(np.ones(1), np.mean) == (1.0, 1.0)


def test_bleu_is_that_of_the_corpus_and_its_bounds_hold_it():
    sacrebleu = pytest.importorskip("sacrebleu")
    expected = ["the cat sat on the mat today", "a dog ran over the long road", "birds fly high in the blue sky"] * 4
    answers = ["the cat sat on a mat today", "a dog ran", "birds fly high in the blue sky now"] * 4
    metric = Metric("bleu")
    values = np.array([[metric.values(*texts, None, "")] for texts in zip(expected, answers, strict=True)])
    (numbers,) = metric.results(values).values()
    result = metric.result(numbers)
    assert result == pytest.approx(sacrebleu.corpus_bleu(answers, [expected]).score / 100, abs=1e-12)
    of_sentences = [sacrebleu.sentence_bleu(a, [e]).score / 100 for a, e in zip(answers, expected, strict=True)]
    assert abs(result - np.mean(of_sentences)) > 0.01
    low, high = metric.bounds(numbers)
    assert 0 < low < result < high < 1


def test_of_several_answers_the_mean_and_the_best_count():
    values = np.array([[[1.0], [0.0]], [[0.0], [0.0]], [[1.0], [1.0]]])  # two answers to each of three prompts
    metric = Metric("number")
    found = {name: metric.result(numbers) for name, numbers in metric.results(values).items()}
    assert found == {"number": 0.5, "number/pass@2": 2 / 3}
    assert list(Metric("token_f1").results(values)) == ["token_f1", "token_f1/best@2"]
    assert list(Metric("bleu").results(np.zeros((3, 2, 10)))) == ["bleu"]
