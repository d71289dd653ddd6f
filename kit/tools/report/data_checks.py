"""Check tokenised training data for common mistakes: BOS, EOS, cut samples, duplicates, leaks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.samples.rows import START_CUT
from kit.data.samples.samples import Samples, duplicates, found_in

# ok: as it should be; look: probably a mistake, the user should look at it; note: no mistake, but worth knowing.
Verdict = Literal["ok", "look", "note"]

MAX_SAMPLES = 10_000  # checked token by token, spread over the data; lengths and duplicates are checked for all samples
NUM_ORIGINS = 5  # shown in a finding
# Why a sample is shown: the reasons that checks find.
REASONS = {
    "no-bos": "does not begin with BOS",
    "bos-twice": "begins with BOS twice",
    "no-end": "does not teach to stop",
    "special-inside": "learns a special token in the middle of an answer",
    "repeated": "occurs more than once",
    "leaked": "also in the evaluation data",
    "nearly-same": "answers that differ in one token",
    "both-ways": "occurs the other way round too",
    "both-labels": "the same answer has both labels",
    "same-prompt": "prompt of several samples",
}
LEAK = "evaluation samples are in the training data"


class Finding(NamedTuple):
    """The result of one check of data.

    Unlike a ``Problem`` it stops nothing: a check may also find that all is well, or what the user should judge.
    """

    verdict: Verdict
    text: str
    reason: str = ""  # a key of ``REASONS``, for which samples are shown
    samples: Sequence[int] = ()  # those that were found, by their indices; the first are shown


def check(train: Samples, evaluation: Samples | None, tokenizer: Any, settings: DataSettings) -> list[Finding]:
    """Run all checks on the training data, and compare them with the evaluation data if there are any."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    looked_at = np.linspace(0, len(train) - 1, min(len(train), MAX_SAMPLES)).round().astype(int)
    firsts, lasts = Counter[tuple[int, ...]](), Counter[int]()
    no_bos, bos_twice, no_end = [], [], []
    for i in looked_at.tolist():
        sequences = train.sequences(i)
        begin = tuple(sequences[0][0][:2].tolist())  # those of a pair begin with the same prompt
        firsts[begin] += 1
        no_bos += [i] if begin[0] != bos else []
        bos_twice += [i] if begin == (bos, bos) else []
        last_learned = [int(ids[np.flatnonzero(weights)[-1]]) for ids, weights in sequences]
        lasts.update(last_learned)
        no_end += [i] if any(last not in special for last in last_learned) else []
    stop = next((id_ for id_, _ in lasts.most_common() if id_ in special), eos)
    findings = _beginnings(firsts, tokenizer, train, no_bos, bos_twice) if bos is not None else []
    findings.append(_endings(lasts, special, tokenizer, train, no_end))
    if settings.train_on != "all":  # with "all", the end of every turn is supervised
        findings.append(_middles(train, looked_at, [id_ for id_ in {bos, eos, stop} if id_ is not None], tokenizer))
    return [*findings, *_cuts(train, settings.max_length, stop), _repeats(train), *_leaks(train, evaluation)]


def counted(num: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: ``1 sample``, ``1,234 samples``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def _split(train: Samples) -> str:
    """Why samples begin and end in the middle of a text, for a finding; empty if no text was split."""
    is_split = any(store.info["counts"].get("num_split") for store in train.stores)
    return ", as excess_length_strategy split makes pieces that begin and end anywhere" if is_split else ""


def _beginnings(
    firsts: Counter[tuple[int, ...]], tokenizer: Any, train: Samples, no_bos: list[int], bos_twice: list[int]
) -> list[Finding]:
    bos, token = tokenizer.bos_token_id, tokenizer.bos_token
    begin = sum(count for ids, count in firsts.items() if ids[0] == bos)
    num = firsts.total()
    twice = firsts[bos, bos]
    why = _split(train)
    if not begin and tokenizer("a").input_ids[:1] == [bos]:
        return [
            Finding(
                "look",
                f"no sample begins with {token}, which the tokenizer puts before any other text",
                "no-bos",
                no_bos,
            )
        ]
    if not begin:
        return [Finding("ok", f"no sample begins with {token}: the template writes none")]
    text = f"{begin:,} of {num:,} samples begin with {token}"
    if begin == num:
        findings = [Finding("ok", text)]
    else:
        findings = [Finding("note" if why else "look", text + why, "no-bos", no_bos)]
    if twice:
        findings.append(Finding("look", f"{twice:,} begin with it twice", "bos-twice", bos_twice))
    else:
        findings.append(Finding("ok", "none begins with it twice"))
    return findings


def _endings(lasts: Counter[int], special: set[int], tokenizer: Any, train: Samples, no_end: list[int]) -> Finding:
    num, why = lasts.total(), _split(train)
    ends = sum(count for id_, count in lasts.items() if id_ in special) / num
    shown = [(tokenizer.convert_ids_to_tokens(id_), f"{count / num:.1%}") for id_, count in lasts.most_common(3)]
    named = ", ".join(f"{token!r} {share}" for token, share in shown if share != "0.0%")
    text = f"{ends:.1%} of the {'samples' if train.preferences is None else 'answers'} teach to stop"
    if ends <= 0.99 and why:
        return Finding("note", text + why, "no-end", no_end)
    return Finding("ok" if ends > 0.99 else "look", f"{text}; the last token learned is {named}", "no-end", no_end)


def _middles(train: Samples, looked_at: np.ndarray, ends: list[int], tokenizer: Any) -> Finding:
    """Find answers with a special token in the middle, such as a ``</s>`` that somebody typed.

    Args:
        looked_at: indices of the samples to check.
        ends: ids of the tokens that begin or end a text.
    """
    affected = []  # (sample, token id)
    has_prompt = train.num_targets[looked_at] < train.lengths[looked_at] - 1  # the others are texts, not answers
    for i in looked_at[has_prompt].tolist():
        for ids, weights in ((ids[1:], weights[1:]) for ids, weights in train.sequences(i)):
            stops = np.flatnonzero(np.isin(ids, ends) & (weights > 0)).tolist()
            # The last one ends the answer; a template may write whitespace after it.
            middle = next((a for a, b in pairwise(stops) if weights[a:b].all()), None)
            if middle is not None:
                affected.append((i, int(ids[middle])))
                break
    if not affected:
        return Finding("ok", "no answer goes on after a special token that ends a text")
    sample, id_ = affected[0]
    first = f"first {train.origin(sample)} ({tokenizer.convert_ids_to_tokens(id_)!r})"
    learn = "1 sample learns" if len(affected) == 1 else f"{len(affected):,} samples learn"
    return Finding(
        "look",
        f"{learn} a special token in the middle of an answer, {first}",
        "special-inside",
        [i for i, _ in affected],
    )


def _cuts(train: Samples, max_length: int, stop: int | None) -> list[Finding]:
    num = sum(store.info["counts"].get("num_truncated", 0) for store in train.stores)
    if num and train.preferences is not None:
        return [Finding("note", f"{num:,} with the start of the prompt cut off, to have at most {max_length:,} tokens")]
    is_end_kept = any(START_CUT in store.info["remarks"] for store in train.stores)
    longest = [] if is_end_kept else np.flatnonzero(train.lengths == max_length).tolist()
    cut = (train.origin(i) for i in longest if train[i][0][-1] != stop)  # a sample that stops has this length by itself
    first = listed(islice(cut, NUM_ORIGINS), num)
    if not num:
        return []
    text = f"{num:,} cut at {max_length:,} tokens"
    return [Finding("note", f"{text}, first: {first}" if first else text)]


def _repeats(train: Samples) -> Finding:
    hashes = train.hashes("ids_hash")
    if train.labels is not None:  # the same answer with another label is no repetition
        hashes = hashes ^ train.labels.astype(np.uint64)
    _, content, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    again = np.flatnonzero(counts[content] > 1).tolist()
    if not again:
        return Finding("ok", "no sample occurs twice")
    repeated = "are the same" if (counts > 1).sum() == 1 else "occur more than once"
    origins = listed(map(train.origin, again[:NUM_ORIGINS]), len(again))
    together = sorted(again, key=lambda i: (content[i], i))  # each beside those that it repeats
    return Finding("look", f"{counted(len(again), 'sample')} {repeated}: {origins}", "repeated", together)


def _leaks(train: Samples, evaluation: Samples | None) -> list[Finding]:
    if evaluation is None:
        return []
    exact, similar = duplicates(evaluation, train)
    if not exact and not similar:
        return [Finding("ok", f"none of the {len(evaluation):,} {LEAK}")]
    text = f"{exact + similar:,} of {len(evaluation):,} {LEAK} ({exact:,} token for token)"
    of_train = np.logical_or(*found_in(train, evaluation))
    return [Finding("look", text, "leaked", np.flatnonzero(of_train).tolist())]


def listed(origins: Iterable[str], num: int) -> str:
    """Return the first origins of ``num`` as one text."""
    shown = list(origins)
    return ", ".join(shown) + (", ..." if shown and num > len(shown) else "")
