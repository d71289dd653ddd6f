"""Turns a block of rows into arrays of ids and weights: parse, check, tokenise, and cut to ``max_length``.

Every row is counted, and problems name their row. Nothing here depends on other blocks, so any process can do it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import xxhash

from kit.cache import digest
from kit.config.dataset_entry import DatasetEntry
from kit.data.chat.formats import IGNORE, plain_text, to_sample
from kit.data.chat.template import Jinja
from kit.data.chat.tokens import Encoded, encode_all
from kit.data.chat.unused import WATCHED, Unused, read_keys, without_keys
from kit.data.read.parts import Block
from kit.data.read.sources import Source
from kit.data.read.text import Ending
from kit.data.samples.bad_rows import BadRow
from kit.errors import Problem

# Part of every cache key: raise it whenever the same rows would give other ids or weights, or the files change.
CODE_VERSION = 4
# The spaces and punctuation of ASCII. A regular expression for all of Unicode took a tenth of the whole time.
NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalnum())
START_CUT = "their start was cut off, because excess_length_strategy is keep_end"
# One sample in the cache.
SAMPLE = np.dtype(
    [
        ("start", "<i8"),  # index of its first token in input_ids and weight_codes
        ("length", "<i4"),  # tokens
        ("part", "<i4"),  # index of the part of the source, usually a file
        ("number", "<i8"),  # line or row in that part, from 1
        ("num_targets", "<i4"),  # supervised tokens that have a token before them
        ("target_weight", "<f8"),  # sum of their weights
        ("ids_hash", "<u8"),
        ("text_hash", "<u8"),  # ignores case, and the spaces and punctuation of ASCII
    ]
)


@dataclass(frozen=True)
class Opened:
    """A source that was opened for a data set of the recipe."""

    entry: DatasetEntry  # of the recipe
    source: Source
    fields: dict[str, str]  # the columns to read: our field to their column
    is_evaluation: bool = False

    @cached_property
    def ignored(self) -> frozenset[str]:
        """The columns, and keys of messages, that the user wants to be ignored."""
        return frozenset(theirs for theirs, ours in (self.entry.columns or {}).items() if ours == IGNORE)

    @property
    def key(self) -> list[Any]:
        """What of the columns decides what is learned, for keys of the cache and fingerprints."""
        return [*sorted(self.fields.items()), *read_keys(self.ignored)]

    @cached_property
    def columns(self) -> list[str]:
        """The columns to read: those of the fields, and those that must not be ignored unseen."""
        watched = [name for name in WATCHED if name in self.source.columns and name not in self.ignored]
        return list(dict.fromkeys([*self.fields.values(), *watched]))


@dataclass
class Piece:
    """What a block of rows became: N samples with T tokens in all, as arrays for the cache, and messages."""

    samples: np.ndarray  # SAMPLE [N], `start` counted from the start of this piece
    input_ids: np.ndarray  # int32 [T]
    weight_codes: np.ndarray  # uint8 (or larger, for many weights) [T], each token's index in `weights`
    weights: list[float]
    rows: Sequence[int] = ()  # [N], index of the given row that each sample is from
    bad: list[BadRow] = field(default_factory=list)  # in the order of the rows; a row may be there more than once
    problems: list[Problem] = field(default_factory=list)  # others, for which no row can be skipped
    unused: Counter[str] = field(default_factory=Counter)  # rows for each column, or key of messages, not used
    counts: Counter[str] = field(default_factory=Counter)  # what became of the rows
    remarks: Counter[str] = field(default_factory=Counter)  # rows for each remark

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """``(input_ids int32 [T], weights float32 [T])`` of sample ``i``."""
        start, length = self.samples["start"][i], self.samples["length"][i]
        codes = self.weight_codes[start : start + length]
        return self.input_ids[start : start + length], np.array(self.weights, np.float32)[codes]


_Kept = tuple[int, int, int, Encoded, int]  # part, number, index of the row, ids and weights, text_hash


@dataclass(frozen=True)
class Encoder:
    """How rows become samples: everything that ids and weights depend on, except the rows themselves."""

    tokenizer: Any
    template: Jinja  # Jinja text of the chat template
    prompts_as_chat: bool  # prompt and completion as texts become a user and an assistant message
    train_on: Literal["assistant", "last", "all"]
    max_length: int  # tokens
    excess_length_strategy: str

    def key(self) -> list[Any]:
        """What identifies this encoder in the key of a cache entry."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        del state["truncation"], state["padding"]  # earlier calls may have set these; they have no effect here
        settings = (self.template, self.prompts_as_chat, self.train_on, self.max_length, self.excess_length_strategy)
        return [CODE_VERSION, *settings, digest(state, self.tokenizer.special_tokens_map)]

    def encode_block(self, opened: Opened, part: int, block: Block) -> Piece:
        """Parse, check and tokenise a block of the source's part number ``part``."""
        return self.encode(opened, ((part, number, row) for number, row in opened.source.parts[part].rows(block)))

    def encode(self, opened: Opened, rows: Iterable[tuple[int, int, Any]]) -> Piece:
        """Check and tokenise rows, each given as the number of its part, its own number, and its parsed content.

        What is wrong with rows is not raised: it is in ``Piece.bad`` and ``Piece.problems``.
        """
        source, fields = opened.source, opened.fields
        piece = Piece(np.empty(0, SAMPLE), np.empty(0, np.int32), np.empty(0, np.uint8), [0.0, 1.0])
        unused, ignored_keys = Unused(fields, opened.ignored), read_keys(opened.ignored)
        unread = set(source.columns) - set(opened.columns)
        origins: list[tuple[int, int, int]] = []
        samples = []

        def refuse(part: int, number: int, problems: Iterable[Problem], is_common: bool = False) -> None:
            origin = source.origin(part, number)
            piece.bad += [BadRow(part, number, origin, problem, is_common) for problem in problems]

        for index, (part, number, row) in enumerate(rows):
            if row is None:
                piece.counts["num_blank_lines"] += 1
            elif isinstance(row, Ending):
                piece.problems.append(row)
            elif isinstance(row, Problem):
                refuse(part, number, [replace(row, where=row.where.removeprefix(source.origin(part, number)).strip())])
            else:
                row = without_keys(row, ignored_keys)
                harm = unused.check(row)
                if source.parts[part].has_schema:  # then only some columns were read
                    unused.counts.update(unread)
                sample = to_sample(row, fields)
                if isinstance(sample, list) or harm:
                    refuse(part, number, sample if isinstance(sample, list) else harm, not isinstance(sample, list))
                else:
                    origins.append((part, number, index))
                    samples.append(sample)
        piece.unused = unused.counts
        results = encode_all(samples, self.tokenizer, self.template, self.prompts_as_chat, self.train_on)
        kept: list[_Kept] = []
        for (part, number, index), sample, result in zip(origins, samples, results, strict=True):
            if isinstance(result, Problem):  # usually about the template, so many rows have the same one
                refuse(part, number, [result], is_common=True)
                continue
            piece.counts["num_rows"] += 1
            piece.counts["num_encoded"] += len(result)  # more than rows where a template rewrites earlier turns
            piece.remarks.update({remark for encoded in result for remark in encoded.remarks})
            letters = plain_text(sample).casefold().encode().translate(None, NO_LETTERS)
            text_hash = xxhash.xxh3_64_intdigest(letters)
            for encoded in result:
                if len(encoded.input_ids) > self.max_length and self.excess_length_strategy == "error":
                    found = f"{len(encoded.input_ids)} tokens"
                    fix = "raise max_length, or choose another --excess_length_strategy"
                    problem = Problem(source.origin(part, number), found, f"at most {self.max_length}", fix)
                    piece.problems.append(problem)
                else:
                    kept += [(part, number, index, cut, text_hash) for cut in self._fit(encoded, piece)]
        piece.bad.sort(key=lambda row: row[:2])
        self._fill(piece, kept)
        return piece

    def _fit(self, encoded: Encoded, piece: Piece) -> list[Encoded]:
        """The sample cut to ``max_length``, which may leave no sample or several. Adds to the counts of ``piece``."""
        limit, ids, weights, counts = self.max_length, encoded.input_ids, encoded.weights, piece.counts
        pieces = [encoded]
        if len(ids) > limit:
            match self.excess_length_strategy:
                case "drop":
                    counts["num_dropped_long"] += 1
                    return []
                case "split":
                    counts["num_split"] += 1
                    # Neighbouring pieces share a token, so that every token except the very first is a target once.
                    cuts = range(0, len(ids) - 1, limit - 1)
                    pieces = [Encoded(ids[i : i + limit], weights[i : i + limit]) for i in cuts]
                case "keep_end":
                    counts["num_truncated"] += 1
                    piece.remarks[START_CUT] += 1
                    kept = 1 if ids[0] == self.tokenizer.bos_token_id else 0  # tokens of the start: BOS stays first
                    rest = len(ids) - limit + kept
                    pieces = [Encoded(ids[:kept] + ids[rest:], weights[:kept] + weights[rest:])]
                case _:
                    counts["num_truncated"] += 1
                    pieces = [Encoded(ids[:limit], weights[:limit])]
        supervised = [fitted for fitted in pieces if any(fitted.weights[1:])]
        counts["num_dropped_unsupervised"] += len(pieces) - len(supervised)
        return supervised

    def _fill(self, piece: Piece, kept: list[_Kept]) -> None:
        """Write the samples into the arrays of ``piece``."""
        if not kept:
            return
        parts, numbers, piece.rows, pieces, text_hashes = zip(*kept, strict=True)
        lengths = np.array([len(encoded.input_ids) for encoded in pieces])
        piece.input_ids = np.fromiter(chain.from_iterable(e.input_ids for e in pieces), np.int32, lengths.sum())
        weights = np.fromiter(chain.from_iterable(e.weights for e in pieces), np.float32, lengths.sum())
        if ((weights == 0) | (weights == 1)).all():
            piece.weight_codes = weights.astype(np.uint8)
        else:
            values, codes = np.unique(weights, return_inverse=True)
            piece.weights, piece.weight_codes = values.tolist(), codes.astype(np.min_scalar_type(len(values)))
        piece.samples = samples = np.zeros(len(kept), SAMPLE)
        samples["length"], samples["start"] = lengths, np.cumsum(lengths) - lengths
        samples["part"], samples["number"], samples["text_hash"] = parts, numbers, np.array(text_hashes, np.uint64)
        targets = weights > 0
        targets[samples["start"]] = False  # nothing predicts a first token
        samples["num_targets"] = np.add.reduceat(targets, samples["start"], dtype=np.int64)
        samples["target_weight"] = np.add.reduceat(weights * targets, samples["start"], dtype=np.float64)
        bounds = zip(samples["start"].tolist(), lengths.tolist(), strict=True)
        hashes = [xxhash.xxh3_64_intdigest(piece.input_ids[start : start + n].data) for start, n in bounds]
        samples["ids_hash"] = np.array(hashes, np.uint64)
