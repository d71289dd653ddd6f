"""Metrics of generated answers: each gives a number from 0 to 1 for an answer and the text that was expected.

Promises: a metric depends on nothing but the two texts, so its mean is the same on every topology. The bounds of a mean
are the same at each call.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_NUM_RESAMPLES = 1000


def exact_match(answer: str, expected: str) -> float:
    """Return 1 if the texts are equal, apart from whitespace at both ends."""
    return float(answer.strip() == expected.strip())


def number(answer: str, expected: str) -> float:
    """Return 1 if the last number in each text is the same, as of GSM8K, whose answers end with ``#### 72``.

    Commas within a number do not count. Without a number in the expected text it is 0.
    """
    last, wanted = (_NUMBER.findall(text) for text in (answer, expected))
    return float(bool(last and wanted) and _value(last[-1]) == _value(wanted[-1]))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def token_f1(answer: str, expected: str) -> float:
    """Return the F1 of the words that both texts have.

    Words are lower-case, without punctuation and articles: Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250,
    section 6.1, as its script computes them.
    """
    words, wanted = _words(answer), _words(expected)
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


def chrf(answer: str, expected: str) -> float:
    """Return the chrF of one answer, by sacrebleu, as a share of 1."""
    from sacrebleu import sentence_chrf

    return float(sentence_chrf(answer, [expected]).score) / 100


def rouge_l(answer: str, expected: str) -> float:
    """Return the F1 of ROUGE-L, by rouge-score, without stemming."""
    return float(_rouge().score(expected, answer)["rougeL"].fmeasure)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"])


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "number": number,
    "token_f1": token_f1,
    "chrf": chrf,
    "rouge_l": rouge_l,
}


def bounds_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds between which 95 % of the means of resampled ``values`` lie (percentile bootstrap)."""
    array = np.asarray(values)  # [N]
    draw = np.random.default_rng(0)
    means = [array[draw.integers(len(array), size=len(array))].mean() for _ in range(_NUM_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
