"""Check tokenised training data for common mistakes: BOS, EOS, typed special tokens, repeats, leaks."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.samples.samples import Samples, duplicates

MAX_SAMPLES = 10_000  # checked token by token, spread over the data
NUM_ORIGINS = 5  # shown in a finding
LEAK = "evaluation samples are in the training data"


class Finding(NamedTuple):
    """The result of one check of data. Unlike a ``Problem`` it does not stop a run: the user decides."""

    is_ok: bool
    text: str


def check(
    train: Samples, evaluation: Samples | None, tokenizer: Any, settings: DataSettings, rolls_out: bool
) -> list[Finding]:
    """Run all checks on the training data, and compare them with the evaluation data if there are any."""
    looked_at = np.linspace(0, len(train) - 1, min(len(train), MAX_SAMPLES)).round().astype(int).tolist()
    found = [*_tokens(train, looked_at, tokenizer, settings, rolls_out), _repeats(train)]
    if evaluation is not None:
        num = duplicates(evaluation, train)
        found.append(Finding(not num, f"{num:,} of {len(evaluation):,} {LEAK}"))
    return [*found, *_preferences(train)]


def _tokens(
    train: Samples, looked_at: list[int], tokenizer: Any, settings: DataSettings, rolls_out: bool
) -> Iterator[Finding]:
    """BOS, the stop tokens of answers, and special tokens within answers."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    without, twice, endless, typed = [], [], [], []
    for i in looked_at:
        for ids, weights in train.sequences(i):
            begin, supervised = ids[:2].tolist(), np.flatnonzero(weights > 0)
            if begin[0] != bos:
                without.append(i)
            elif begin == [bos, bos]:
                twice.append(i)
            if not len(supervised):  # a prompt alone
                continue
            last = int(ids[supervised[-1]])
            if last not in special:
                endless.append(i)
            is_answer = len(supervised) < len(ids) - 1  # else it is a text
            ends = {bos, eos, last} & special
            stops = [at for at in supervised[supervised > 0].tolist() if int(ids[at]) in ends]
            if is_answer and settings.train_on != "all" and any((weights[a:b] > 0).all() for a, b in pairwise(stops)):
                typed.append(i)
    if bos is not None:
        name = tokenizer.bos_token
        expects = tokenizer("a").input_ids[:1] == [bos]  # the tokenizer begins any other text with it
        yield _finding(train, without, f"begin without {name}", is_ok=not without or not expects)
        yield _finding(train, twice, f"begin with {name} twice")
    if rolls_out or train.kind.pools:
        return  # no answer of the data is trained on
    is_split = any(store.info["counts"].get("num_split") for store in train.stores)
    few = len(set(endless)) <= 0.01 * len(looked_at)
    text = "are not trained to stop" + (" (split makes pieces that end anywhere)" if is_split else "")
    yield _finding(train, endless, text, is_ok=few or is_split)
    yield _finding(train, typed, "have a supervised special token within an answer")


def _finding(train: Samples, found: list[int], text: str, is_ok: bool | None = None) -> Finding:
    found = sorted(set(found))
    text = f"{len(found):,} samples {text}"
    origins = ", ".join(train.origin(i) for i in found[:NUM_ORIGINS])
    more = ", ..." if len(found) > NUM_ORIGINS else ""
    return Finding(not found if is_ok is None else is_ok, f"{text}: {origins}{more}" if found else text)


def _repeats(train: Samples) -> Finding:
    _, content, counts = np.unique(train.kind.hashes(train, train.hashes), return_inverse=True, return_counts=True)
    return _finding(train, np.flatnonzero(counts[content] > 1).tolist(), "occur more than once")


def _preferences(train: Samples) -> Iterator[Finding]:
    """Length bias, which an objective may pick up instead of the preference."""
    if train.kind.compares_answers:
        good, bad = train.sequence_lengths.T  # after the same prompt
        share = (good > bad).mean()
        text = f"the chosen answer is the longer one in {share:.1%} of the pairs"
        yield Finding(0.2 <= share <= 0.8 or len(train) < 20, text)
