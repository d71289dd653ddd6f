"""What commonly goes wrong with training data, looked for in the very ids a run would see.

A finding is ``(fine, text)``: ``fine`` is False where a user should look, None where something is only worth knowing.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.data.samples.samples import Samples, duplicates

Finding = tuple[bool | None, str]

MAX_SAMPLES = 10_000  # looked into, spread over the data; lengths and duplicates are of all
NUM_ORIGINS = 5
LEAK = "evaluation samples are in the training data"


def check(train: Samples, evaluation: Samples | None, tokenizer: Any, recipe: Recipe) -> list[Finding]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    looked_at = np.linspace(0, len(train) - 1, min(len(train), MAX_SAMPLES)).round().astype(int)
    firsts, lasts = Counter[tuple[int, ...]](), Counter[int]()
    for i in looked_at.tolist():
        ids, weights = train[i]
        firsts[tuple(ids[:2].tolist())] += 1
        lasts[int(ids[np.flatnonzero(weights)[-1]])] += 1
    stop = next((id_ for id_, _ in lasts.most_common() if id_ in special), eos)
    findings = _beginnings(firsts, tokenizer, train) if bos is not None else []
    findings.append(_endings(lasts, special, tokenizer, train))
    if recipe.train_on != "all":  # which learns the end of every turn
        findings.append(_middles(train, looked_at, [id_ for id_ in {bos, eos, stop} if id_ is not None], tokenizer))
    return [*findings, *_cuts(train, recipe.max_length, stop), _repeats(train), *_leaks(train, evaluation)]


def counted(num: int, noun: str) -> str:
    """``1 sample``, ``1,234 samples``."""
    return f"{num:,} {noun}{'s' * (num != 1)}"


def _split(train: Samples) -> str:
    """Why pieces of texts begin and end anywhere; empty where there are none."""
    is_split = any(store.info["counts"].get("num_split") for store in train.stores)
    return ", as excess_length_strategy split makes pieces that begin and end anywhere" if is_split else ""


def _beginnings(firsts: Counter[tuple[int, ...]], tokenizer: Any, train: Samples) -> list[Finding]:
    bos, token = tokenizer.bos_token_id, tokenizer.bos_token
    begin = sum(count for ids, count in firsts.items() if ids[0] == bos)
    num, twice, why = firsts.total(), firsts[bos, bos], _split(train)
    if not begin and tokenizer("a").input_ids[:1] == [bos]:
        return [(False, f"no sample begins with {token}, which the tokenizer puts before any other text")]
    if not begin:
        return [(True, f"no sample begins with {token}: the template writes none")]
    fine = True if begin == num else None if why else False
    found = f"{begin:,} of {num:,} samples begin with {token}" + ("" if fine else why)
    return [(fine, found), (twice == 0, f"{twice:,} begin with it twice" if twice else "none begins with it twice")]


def _endings(lasts: Counter[int], special: set[int], tokenizer: Any, train: Samples) -> Finding:
    num, why = lasts.total(), _split(train)
    ends = sum(count for id_, count in lasts.items() if id_ in special) / num
    shown = [(tokenizer.convert_ids_to_tokens(id_), f"{count / num:.1%}") for id_, count in lasts.most_common(3)]
    named = ", ".join(f"{token!r} {share}" for token, share in shown if share != "0.0%")
    found = f"{ends:.1%} of the samples teach to stop"
    if ends <= 0.99 and why:
        return None, found + why
    return ends > 0.99, f"{found}; the last token learned is {named}"


def _middles(train: Samples, looked_at: np.ndarray, ends: list[int], tokenizer: Any) -> Finding:
    """Answers that go on after a token that ends or begins a text: as ``</s>`` does that someone typed."""
    found = []
    in_part = train.num_targets[looked_at] < train.lengths[looked_at] - 1  # others are no answers, but whole texts
    for i in looked_at[in_part].tolist():
        ids, weights = (values[1:] for values in train[i])
        stops = np.flatnonzero(np.isin(ids, ends) & (weights > 0)).tolist()
        # The last one is where the answer ends, whatever whitespace a template may write after it.
        found += [(i, int(ids[a])) for a, b in pairwise(stops) if weights[a:b].all()][:1]
    if not found:
        return True, "no answer goes on after a special token that ends a text"
    token, learn = tokenizer.convert_ids_to_tokens(found[0][1]), "learns" if len(found) == 1 else "learn"
    where = f"first {train.origin(found[0][0])} ({token!r})"
    return False, f"{counted(len(found), 'sample')} {learn} a special token in the middle of an answer, {where}"


def _cuts(train: Samples, max_length: int, stop: int | None) -> list[Finding]:
    num = sum(store.info["counts"].get("num_truncated", 0) for store in train.stores)
    longest = np.flatnonzero(train.lengths == max_length).tolist()
    cut = (train.origin(i) for i in longest if train[i][0][-1] != stop)  # others are as long by themselves
    where = _listed(islice(cut, NUM_ORIGINS), num)
    return [(None, f"{num:,} cut at {max_length:,} tokens" + (f", first: {where}" if where else ""))] if num else []


def _repeats(train: Samples) -> Finding:
    _, content, counts = np.unique(train.hashes("ids_hash"), return_inverse=True, return_counts=True)
    again = np.flatnonzero(counts[content] > 1).tolist()
    if not again:
        return True, "no sample stands twice"
    what = "are the same" if (counts > 1).sum() == 1 else "stand more than once"
    where = _listed(map(train.origin, again[:NUM_ORIGINS]), len(again))
    return False, f"{counted(len(again), 'sample')} {what}: {where}"


def _leaks(train: Samples, evaluation: Samples | None) -> list[Finding]:
    if evaluation is None:
        return []
    exact, similar = duplicates(evaluation, train)
    if not exact and not similar:
        return [(True, f"none of the {len(evaluation):,} {LEAK}")]
    return [(False, f"{exact + similar:,} of {len(evaluation):,} {LEAK} ({exact:,} token for token)")]


def _listed(origins: Iterable[str], num: int) -> str:
    shown = list(origins)
    return ", ".join(shown) + (", ..." if shown and num > len(shown) else "")
