"""The samples that ``kit inspect`` shows, token by token, spread over the data; then rows that were skipped.

Promises: the number of tokens shown of a sample is bounded, so a page stays small.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from kit.data.chat.tokens import MediaCodec
from kit.data.media import Media
from kit.data.read.media_files import small
from kit.data.samples.samples import Samples
from kit.system.credentials import secret_spans
from kit.system.visible import visible

MAX_TOKENS = 1000  # shown of a part of a sample: its beginning and its end
SIDE = 320  # pixels of a picture on a page
MAX_SKIPPED = 3  # rows, of each dataset


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str  # empty if more tokens are needed to complete a character
    weight: float  # in the loss; 0: not supervised
    is_special: bool
    picture: str = ""  # a small copy of the image for which it stands, as a data: URI


@dataclass(frozen=True)
class Part:
    """Tokens of a sample: all of it; of a pair the prompt with the chosen answer, and with the rejected one."""

    name: str  # empty if it is all
    tokens: list[Token]
    is_bad: bool  # a rejected or undesirable answer


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is shown, or a skipped row."""

    origin: str  # ``file:line``
    about: str  # its tokens, or why it was skipped
    parts: Sequence[Part] = ()


Sequences = Sequence[tuple[np.ndarray, np.ndarray]]  # ids [T] and weights [T]; of a pair those of both halves


def shown_samples(train: Samples, tokenizer: Any, num: int, are_prompts: bool) -> list[ShownSample]:
    """Return ``num`` samples spread over the data, then some rows that were skipped.

    With 0, none is shown. For rollouts the prompt is shown, with the expected answer, which is marked.
    """
    if not num:
        return []
    samples = []
    for i in _spread(train.dataset_ids, num):
        sequences = train.sequences(i)
        if are_prompts:
            start, end = train.answer_spans[i]
            sequences = [(sequences[0][0][:end], np.arange(end) >= start)]
        kind, names = train.kind, train.kind.names(train, i)
        word = "expected" if are_prompts else "pooled" if kind.pools else "supervised"
        about = _counted(sequences, word, names, kind.pools) + kind.about(train, i)
        parts = [
            Part(name, tokens_of(*sequence, tokenizer), kind.is_bad(train, i, name))
            for name, sequence in zip(names, sequences, strict=True)
        ]
        if codec := train.media_codec:
            given = codec, train.media(i)
            parts = [_with_pictures(part, ids, *given) for part, (ids, _) in zip(parts, sequences, strict=True)]
        parts = [replace(part, tokens=_ends(part.tokens)) for part in parts]
        samples.append(ShownSample(train.origin(i), about, parts))
    for store in train.stores:
        skipped = store.skipped[:MAX_SKIPPED]
        samples += [ShownSample(row["row"], f"skipped: {row['problems'][0]}") for row in skipped]
    return samples


def _spread(dataset_ids: np.ndarray, num: int) -> list[int]:
    """The indices of ``num`` samples, from each dataset in proportion, and at least one."""
    chosen: list[int] = []
    for dataset_id in np.unique(dataset_ids):
        own = np.flatnonzero(dataset_ids == dataset_id)
        share = max(1, round(num * len(own) / len(dataset_ids)))
        chosen += own[np.linspace(0, len(own) - 1, min(share, len(own))).astype(int)].tolist()
    return chosen


def _counted(sequences: Sequences, word: str, names: Sequence[str], pooled: bool) -> str:
    counts = []
    for ids, weights in sequences:
        marked = int((weights[not pooled :] > 0).sum())
        counts.append(f"{len(ids):,} tokens, {marked:,} {word} ({marked / len(ids):.0%})")
    return "; ".join(f"{name} {count}".lstrip() for name, count in zip(names, counts, strict=True))


def _with_pictures(part: Part, ids: np.ndarray, codec: MediaCodec, media: Sequence[tuple[Media, str]]) -> Part:
    """Replace the placeholders of each image by one token with its picture."""
    left = [*map(codec.count, codec.texts([each for each, _ in media]))]
    tokens: list[Token] = []
    k, num_seen = 0, 0
    for token, id_ in zip(part.tokens, ids.tolist(), strict=True):
        if id_ not in codec.placeholder_ids:
            tokens.append(token)
            continue
        if not num_seen:
            own = media[k][0]
            first, second = own.size
            size = f"{second} x {first}" if own.kind == "image" else f"{first / second:.2f} s"
            tokens.append(Token(f"[{own.kind} {size}: {left[k]} tokens]", 0.0, True, small(*media[k], SIDE)))
        num_seen += 1
        if num_seen == left[k]:
            k, num_seen = k + 1, 0
    return replace(part, tokens=tokens)


def _ends(tokens: list[Token]) -> list[Token]:
    """The beginning and the end of a sequence."""
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
        weights: [T], of each token in the loss; that of the first one is 0 there, as no token predicts it.
    """
    weights = np.append(0.0, weights[1:])
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
