"""The samples that ``kit inspect`` shows, token by token: spread over the data, then some of what was cut or left out.

Promises: of what was cut, left out or skipped some is shown, as it would be without the cut. The number of tokens shown
of a sample is bounded, so a page stays small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from kit.data.open import Data
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import Dataset
from kit.data.samples.halves import Halves, without_start_of_prompt
from kit.data.samples.rows import Encoder
from kit.data.samples.samples import Store
from kit.secrets import secret_spans
from kit.visible import visible

MAX_TOKENS = 1000  # shown of a part of a sample: its beginning and its end
MAX_ROWS_READ = 200_000  # again, to find what was cut or left out
MAX_LOST = 3  # samples that were cut, left out, or skipped, of each data set


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str  # empty if more tokens are needed to complete a character
    weight: float  # in the loss; 0: not supervised
    is_special: bool
    is_cut: bool = False  # not in the sample, because of its length


@dataclass(frozen=True)
class Part:
    """Tokens of a sample: all of it; of a pair the prompt with the chosen answer, and with the rejected one."""

    name: str  # empty if it is all
    tokens: list[Token]
    is_bad: bool = False  # an answer that is to become less likely


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is shown, or a row of which no sample was made."""

    origin: str  # ``file:line``
    about: str  # what it is, or what happened to it
    parts: Sequence[Part] = ()


Sequences = Sequence[tuple[np.ndarray, np.ndarray]]  # ids [T] and weights [T]; of a pair those of both halves


def shown_samples(data: Data, tokenizer: Any, num: int) -> list[ShownSample]:
    """Return ``num`` samples spread over the data, then some of what was cut, left out and skipped.

    With 0, none is shown.
    """
    if not num:
        return []
    train = data.train
    samples = []
    for i in _spread(train.dataset_ids, num):
        label = "" if not train.are_rated or train.labels is None else f", label {str(bool(train.labels[i])).lower()}"
        sequences = train.sequences(i)
        parts = _parts(sequences, [np.ones(len(ids), bool) for ids, _ in sequences], tokenizer)
        parts = [replace(part, is_bad=True) for part in parts] if label.endswith("false") else parts
        samples.append(ShownSample(train.origin(i), _counted(sequences) + label, parts))
    for store, dataset in zip(train.stores, data.datasets, strict=True):
        samples += list(_lost(store, dataset, data.encoder, tokenizer))
        skipped = store.skipped.rows[:MAX_LOST]
        samples += [ShownSample(row.origin, f"skipped: {row.problem}".partition("\n")[0]) for row in skipped]
    return samples


def _spread(dataset_ids: np.ndarray, num: int) -> list[int]:
    """The indices of ``num`` samples, of each data set its share, and at least one."""
    chosen: list[int] = []
    for dataset_id in np.unique(dataset_ids):
        own = np.flatnonzero(dataset_ids == dataset_id)
        share = max(1, round(num * len(own) / len(dataset_ids)))
        chosen += own[np.linspace(0, len(own) - 1, min(share, len(own))).astype(int)].tolist()
    return chosen


def _counted(sequences: Sequences) -> str:
    counts = []
    for ids, weights in sequences:
        learned = int((weights[1:] > 0).sum())
        counts.append(f"{len(ids):,} tokens, {learned:,} learned ({learned / len(ids):.0%})")
    return counts[0] if len(counts) == 1 else f"chosen {counts[0]}; rejected {counts[1]}"


def _lost(store: Store, dataset: Dataset, encoder: Encoder, tokenizer: Any) -> Iterator[ShownSample]:
    """Yield the first samples that were cut or left out, as they would be without it. Reads the rows again."""
    counts = store.info["counts"]
    keys = ("num_truncated", "num_split", "num_dropped_long", "num_dropped_unsupervised")
    left = min(MAX_LOST, sum(counts.get(key, 0) for key in keys))
    if not left:
        return
    samples = store.arrays["samples"][:MAX_ROWS_READ]  # in the order of the rows
    is_full = samples["length"] >= encoder.max_length  # of a pair, both halves together
    rows = samples[["part", "number"]]
    whole = set(rows[~is_full].tolist()) - set(rows[is_full].tolist())  # the others may have been cut
    skipped = {(row.part, row.number) for row in store.skipped.rows}
    for count, (part, number, row) in enumerate(read_rows(store.source.parts, dataset.columns)):
        if not left or count == MAX_ROWS_READ:
            return
        if not isinstance(row, dict) or (part, number) in skipped or (part, number) in whole:
            continue
        for halves in encoder.whole(dataset, row):
            kept = _kept(halves, encoder)
            if left and not all(each.all() for each in kept):
                left -= 1
                sequences = [(np.array(half.input_ids), np.array(half.weights, np.float32)) for half in halves]
                what = "cut" if any(each.any() for each in kept) else "left out"
                about = f"{what}: {sum(int((~each).sum()) for each in kept):,} tokens; max_length "
                about += f"{encoder.max_length:,}; without the cut {_counted(sequences)}"
                yield ShownSample(store.source.origin(part, number), about, _parts(sequences, kept, tokenizer))


def _kept(halves: Halves, encoder: Encoder) -> list[np.ndarray]:
    """Which tokens of each half are in a sample, bool [T]."""
    lengths = [len(half.input_ids) for half in halves]
    if max(lengths) <= encoder.max_length:
        return [np.full(length, any(half.weights[1:])) for length, half in zip(lengths, halves, strict=True)]
    kept = [np.zeros(length, bool) for length in lengths]
    if encoder.wanted == "answers":
        weights = np.array(halves[0].weights)
        for slices in encoder.pieces(halves[0].input_ids):
            at = np.concatenate([np.arange(lengths[0])[each] for each in slices])
            kept[0][at] |= weights[at[1:]].any()  # a piece in which nothing is learned is left out
    elif encoder.excess_length_strategy != "drop":
        bos = encoder.tokenizer.bos_token_id
        if cut := without_start_of_prompt(halves, encoder.max_length, bos):
            start = 1 if halves[0].input_ids[0] == bos else 0  # BOS stays
            for each, half in zip(kept, cut, strict=True):
                each[:] = True
                each[start : start + len(each) - len(half.input_ids)] = False
    return kept


def _parts(sequences: Sequences, kept: Sequence[np.ndarray], tokenizer: Any) -> list[Part]:
    names = ("chosen", "rejected") if len(sequences) > 1 else ("",)
    return [
        Part(name, _tokens(ids, weights, own, tokenizer), is_bad=name == "rejected")
        for name, (ids, weights), own in zip(names, sequences, kept, strict=True)
    ]


def _tokens(ids: np.ndarray, weights: np.ndarray, kept: np.ndarray, tokenizer: Any) -> list[Token]:
    """The beginning and the end of a sequence, token by token."""
    weights = np.append(0.0, weights[1:])  # the first token has no token before it that predicts it
    tokens = tokens_of(ids, weights, tokenizer)
    tokens = [replace(token, is_cut=not is_kept) for token, is_kept in zip(tokens, kept, strict=True)]
    num_hidden, half = len(tokens) - MAX_TOKENS, MAX_TOKENS // 2
    if num_hidden <= 0:
        return tokens
    return [*tokens[:half], Token(f"\n... {num_hidden:,} tokens ...\n", 0.0, True), *tokens[-half:]]


def tokens_of(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> list[Token]:
    """Decode token by token.

    The texts of the tokens, joined, are the decoded sample with its control characters made visible. If a character
    consists of several tokens, the last of them has it as its text.

    Args:
        ids: [T].
        weights: [T], of each token in the loss.
    """
    special = set(tokenizer.all_special_ids) | {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    stream = DecodeStream(skip_special_tokens=False)
    tokens, text = [], None
    for id_, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        text = stream.step(tokenizer.backend_tokenizer, id_)
        tokens.append(Token(visible(text or ""), weight, id_ in special))
    if text is None and tokens:  # the sample was cut within a character
        tokens[-1] = replace(tokens[-1], text="\ufffd")
    return _without_secrets(tokens)


def _without_secrets(tokens: list[Token]) -> list[Token]:
    """Replace tokens that spell a credential by ``***``. On the page it could not be found, as tokens are separate."""
    ends = np.cumsum([len(token.text) for token in tokens])
    for start, end in secret_spans("".join(token.text for token in tokens)):
        first, last = (int(i) for i in np.searchsorted(ends, [start, end - 1], side="right"))
        for i in range(first, last + 1):
            tokens[i] = replace(tokens[i], text="***" if i == first else "")
    return tokens
