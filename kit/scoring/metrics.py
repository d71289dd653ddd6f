"""Metrics of generated answers: each compares an answer with the text that was expected.

Those of the kit go from 0 to 1. All but ``bleu`` give a number for each answer, and the result is their mean. ``bleu``
is of the corpus: the counts of all answers are added up, and the score is that of the sums. ``tool_calls`` passes over
answers that neither call nor should.

Promises: a metric depends on nothing but the two texts (a user's also on the row of the data), so the result is the
same on every topology. The confidence interval of a result is the same at each call.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kit.scoring import own_metric

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_NUM_RESAMPLES = 1000


def exact_match(answer: str, expected: str) -> float:
    """Return 1 if the texts are equal, apart from whitespace at both ends."""
    return float(answer.strip() == expected.strip())


def number(answer: str, expected: str) -> float:
    """Return 1 if the last number in each text is the same, as for GSM8K, whose answers end with ``#### 72``.

    Commas within a number do not count. Without a number in the expected text it is 0.
    """
    last, wanted = (_NUMBER.findall(text) for text in (answer, expected))
    return float(bool(last and wanted) and _value(last[-1]) == _value(wanted[-1]))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def token_f1(answer: str, expected: str) -> float:
    """Return the token F1 of the texts.

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
    """Return the sentence-level chrF by sacrebleu, from 0 to 1. Its mean over answers is not corpus chrF."""
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
BLEU, TOOL_CALLS = "bleu", "tool_calls"
_RIGHT_OR_WRONG = ("exact_match", "number", TOOL_CALLS)
_NUM_COUNTS = 10  # that BLEU needs of an answer


def bleu_counts(answer: str, expected: str) -> list[float]:
    """Return what BLEU needs of one answer, by sacrebleu with its default tokenisation.

    These are the words of the answer and of the expected text, then of 1 to 4 words in a row those that both have, then
    those that the answer has: 10 counts.
    """
    found = _bleu().sentence_score(answer, [expected])
    return [found.sys_len, found.ref_len, *found.counts, *found.totals]


def bleu_of(counts: np.ndarray) -> float:
    """Return the corpus BLEU, from 0 to 1, given the sums of ``bleu_counts`` over its answers, float64 [10].

    As sacrebleu computes it by default: Papineni et al. 2002, https://aclanthology.org/P02-1040, with exponential
    smoothing of counts that are 0.
    """
    sys_len, ref_len, *rest = counts.round().astype(int).tolist()
    from sacrebleu.metrics import BLEU as Bleu

    return float(Bleu.compute_bleu(rest[:4], rest[4:], sys_len, ref_len).score) / 100


@cache
def _bleu() -> Any:
    from sacrebleu.metrics import BLEU as Bleu

    return Bleu(effective_order=True)  # which changes the score of one answer, that nobody reads, and no count


@dataclass(frozen=True)
class Metric:
    """One of the setting ``metrics``: a name of ``METRICS``, ``bleu``, ``tool_calls``, or ``FILE.py:FUNCTION``.

    ``compare``: for ``tool_calls``, see ``kit.rollouts.tools.tool_calls.CallReader.equal``.
    """

    name: str
    compare: Callable[[str, str, str], float] | None = None

    @property
    def key(self) -> str:
        """Its name in results."""
        return own_metric.key_of(self.name)

    @property
    def num_values(self) -> int:
        """How many numbers it needs for an answer."""
        return _NUM_COUNTS if self.name == BLEU else 1

    def values(self, expected: str | None, answer: str, row: Any, origin: str, prompt: str = "") -> Sequence[float]:
        """Return the ``num_values`` numbers of one answer. See ``own_metric.score``, also for what is raised."""
        if own_metric.is_own(self.name):
            return [own_metric.score(self.name, expected, answer, row, origin)]
        assert expected is not None, "refused before the run"
        if self.compare and self.name == TOOL_CALLS:
            return [self.compare(prompt, expected, answer)]
        if self.name == BLEU:
            return bleu_counts(answer, expected)
        return [METRICS[self.name](answer, expected)]

    def results(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the numbers of each row of the data, by the name of the result that they make.

        Args:
            values: of n answers to each of N rows, float64 [N, n, num_values]; NaN: passed over.

        Returns:
            float64 [N, num_values], without rows that are passed over: under the metric's own name the mean over the n
            answers; if n is above 1 also their best, as ``number/pass@4`` of what is right or wrong, as
            ``token_f1/best@4`` of another. BLEU has no best: it is not a number of an answer.
        """
        num = values.shape[1]
        values = values[~np.isnan(values).all(axis=(1, 2))]
        found = {self.key: np.nanmean(values, axis=1) if num > 1 else values[:, 0]}
        if num > 1 and self.name != BLEU:
            found[f"{self.key}/{'pass' if self.name in _RIGHT_OR_WRONG else 'best'}@{num}"] = np.nanmax(values, axis=1)
        return found

    def result(self, numbers: np.ndarray) -> float:
        """Return the result for numbers [N, num_values] of ``results``: their mean, or BLEU of their sums."""
        return bleu_of(numbers.sum(axis=0)) if self.name == BLEU else float(numbers[:, 0].mean())

    def bounds(self, numbers: np.ndarray) -> tuple[float, float]:
        """Return the 95 % confidence interval of ``result``, by percentile bootstrap over rows."""
        return bounds_of(numbers, self.result)


def is_share(key: str) -> bool:
    """Return whether a metric of answers in ``metrics.jsonl`` goes from 0 to 1: one of the kit, not of the user."""
    return key.removeprefix("eval_").partition("/")[0] in (*METRICS, BLEU, TOOL_CALLS)


def bounds_of(array: np.ndarray, result: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """Return the 95 % bootstrap confidence interval of ``result`` over the rows of ``array`` [N, ...]."""
    draw = np.random.default_rng(0)
    results = [result(array[draw.integers(len(array), size=len(array))]) for _ in range(_NUM_RESAMPLES)]
    low, high = np.percentile(results, [2.5, 97.5])
    return float(low), float(high)
