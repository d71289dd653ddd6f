"""Choose the samples that ``kit inspect`` shows, and why: spread over the data, and some for each thing that it counts.

Promises: of each reason that a sample was cut, left out, skipped or found by a check, some are shown, as they would be
without the cut. The number of tokens shown is bounded, so a page stays small. Rows are read again only where they were
cut or left out, and of large data only blocks that hold such a row.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from kit.data.chat.tokens import Encoded
from kit.data.open import Data
from kit.data.samples.bad_rows import BadRow
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder
from kit.data.samples.samples import Samples, Store
from kit.secrets import secret_spans
from kit.tools.report.data_checks import REASONS, Finding, counted
from kit.visible import visible

MAX_TOKENS_SHOWN = 4000  # of one sample
MIN_TOKENS_SHOWN = 256  # of one sample, if there are many
MAX_TOKENS_OF_LEFT_OUT = 600  # of one that was left out as a whole
MAX_TOKENS_IN_ALL = 200_000
MAX_ROW_CHARACTERS = 2000  # shown of a row that cannot be used
MAX_ROWS_READ = 1_000_000  # again, to find what was cut or left out
MAX_SKIP_REASONS = 10
CUT, LONG, UNSUPERVISED, SKIPPED, SPREAD = "cut", "too-long", "nothing-learned", "skipped", "spread"
LONGEST, SHORTEST, LEAST = "longest", "shortest", "least-learned"


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str  # empty if more tokens are needed to complete a character
    weight: float  # in the loss; 0: not supervised
    is_special: bool
    is_cut: bool = False  # not in the sample, because of its length
    num_hidden: int = 0  # tokens before it that are not shown


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is shown, or a row of which no sample was made."""

    origin: str  # ``file:line``
    tokens: list[Token]  # those that are shown
    num_tokens: int  # of the whole sample, with those that were cut
    num_learned: int  # supervised tokens that the model learns
    remark: str = ""  # what happened to it
    row: str = ""  # as it stands in the data, if it cannot be used
    reasons: list[str] = field(default_factory=list)  # why it is shown: keys

    @property
    def about(self) -> str:
        """Its numbers of tokens, as text."""
        if self.row:
            return "cannot be used"
        share = f"{self.num_learned / self.num_tokens:.0%}"
        return f"{counted(self.num_tokens, 'token')}, {self.num_learned:,} learned ({share})"

    @property
    def more(self) -> str:
        """How many tokens behind the last one are not shown, as text; empty if there are none."""
        num = self.num_tokens - len(self.tokens) - sum(token.num_hidden for token in self.tokens)
        return "" if self.row or not num else counted(num, "more token")


@dataclass(frozen=True)
class Reason:
    """A reason for which samples are shown."""

    key: str  # as it is typed
    label: str
    count: int | None = None  # samples or rows that have it; None: it is no count


class Shown:
    """The samples to show, each once, with all its reasons."""

    def __init__(self, data: Data, tokenizer: Any, num: int, per_reason: int, findings: Sequence[Finding]) -> None:
        """
        Args:
            num: samples spread evenly over the data.
            per_reason: samples for each other reason, if there are as many.
            findings: of the checks of these data.
        """
        self.per_reason = per_reason
        self.reasons: list[Reason] = []
        chosen: dict[int, list[str]] = {}  # reasons of each sample, by its index
        self._count_lost(data)
        for i, key in self._found(data.train, findings, per_reason):
            chosen.setdefault(i, []).append(key)
        for i in spread(data.train.dataset_ids, num):
            chosen.setdefault(i, []).append(SPREAD)
        self.reasons.append(Reason(SPREAD, "spread over the data"))
        lost = _find_lost(data, per_reason, list(chosen))
        rows = _skipped_rows(data, per_reason)
        limit = min(MAX_TOKENS_SHOWN, max(MIN_TOKENS_SHOWN, MAX_TOKENS_IN_ALL // max(1, len(chosen) + len(lost))))
        self.num_tokens = limit  # shown at most of each sample
        whole = {(each.origin, each.ids_left): each for each in lost}  # by what the model sees of them
        self.samples: list[ShownSample] = []
        for i, reasons in sorted(chosen.items()):
            cut = whole.pop((data.train.origin(i), data.train[i][0].tobytes()), None)
            if cut:
                self.samples.append(cut.shown(tokenizer, limit, [CUT, *reasons]))
            else:
                self.samples.append(_shown(data.train, i, tokenizer, limit, reasons))
        self.spread = [sample for sample in self.samples if SPREAD in sample.reasons]  # in the order of the data
        self.samples += [each.shown(tokenizer, limit, [each.reason]) for each in whole.values() if each.is_wanted]
        self.samples += rows
        order = {reason.key: number for number, reason in enumerate(self.reasons)}
        for sample in self.samples:
            sample.reasons.sort(key=lambda key: order[key])
        self.samples.sort(key=lambda sample: order[sample.reasons[0]])

    def _count_lost(self, data: Data) -> None:
        """Add the reasons of what was cut, left out or skipped, with their numbers."""
        counts: Counter[str] = Counter()
        for store in data.train.stores:
            counts.update(store.info["counts"])
        max_length = data.settings.max_length
        found = [
            (CUT, f"cut at {max_length:,} tokens", counts["num_truncated"] + counts["num_split"]),
            (LONG, f"left out: longer than {max_length:,} tokens", counts["num_dropped_long"]),
            (UNSUPERVISED, "left out: nothing to learn", counts["num_dropped_unsupervised"]),
            (SKIPPED, "skipped: cannot be used", sum(store.skipped.num_rows for store in data.train.stores)),
        ]
        self.reasons += [Reason(*each) for each in found if each[2]]

    def _found(self, train: Samples, findings: Sequence[Finding], num: int) -> Iterator[tuple[int, str]]:
        """Yield indices of samples with the key of a reason, and add these reasons."""
        for finding in findings:
            if finding.samples:
                self.reasons.append(Reason(finding.reason, REASONS[finding.reason], len(finding.samples)))
                yield from ((i, finding.reason) for i in finding.samples[:num])
        shares = train.num_targets / train.lengths
        for key, label, values in (
            (LONGEST, "longest", -train.lengths),
            (SHORTEST, "shortest", train.lengths),
            (LEAST, "smallest share learned", shares),
        ):
            self.reasons.append(Reason(key, label))
            few = np.argpartition(values, min(num, len(values)) - 1)[:num]
            yield from ((int(i), key) for i in few[np.argsort(values[few], kind="stable")])
        if len(train.stores) > 1:
            for number, name in enumerate(train.dataset_names):
                own = np.flatnonzero(train.dataset_ids == number)
                self.reasons.append(Reason(f"data-{number + 1}", f"data set {name}", len(own)))
                places = np.linspace(0, len(own) - 1, min(num, len(own))).astype(int)
                yield from ((int(i), f"data-{number + 1}") for i in own[places])


def spread(dataset_ids: np.ndarray, num: int) -> list[int]:
    """Choose ``num`` samples, spread evenly, with at least one of each data set. Returns their indices."""
    chosen: list[int] = np.linspace(0, len(dataset_ids) - 1, min(num, len(dataset_ids))).round().astype(int).tolist()
    present, firsts = np.unique(dataset_ids, return_index=True)
    for dataset_id, first in zip(present, firsts.tolist(), strict=True):
        of_dataset = Counter(int(dataset_ids[i]) for i in chosen)
        if chosen and not of_dataset[dataset_id]:
            most, times = of_dataset.most_common(1)[0]
            if times > 1:
                chosen.remove(max(i for i in chosen if dataset_ids[i] == most))
            chosen.append(first)
    return sorted(chosen)


@dataclass(frozen=True)
class _Lost:
    """A sample of which tokens were cut, or that was left out."""

    origin: str
    reason: str
    encoded: Encoded  # without the cut
    is_kept: np.ndarray  # bool [T]: which tokens the model sees
    remark: str
    is_wanted: bool  # for its reason, and not only because it was chosen for another one

    @property
    def ids_left(self) -> bytes:
        """The ids that the model sees of it."""
        return np.array(self.encoded.input_ids, np.int32)[self.is_kept].tobytes()

    def shown(self, tokenizer: Any, limit: int, reasons: list[str]) -> ShownSample:
        ids, weights = np.array(self.encoded.input_ids), np.array(self.encoded.weights, np.float32)
        weights[0] = 0
        borders = np.flatnonzero(np.diff(self.is_kept))[:1].tolist()
        if not self.is_kept.any():  # where it begins to be learned is what the reader looks for
            limit, borders = min(limit, MAX_TOKENS_OF_LEFT_OUT), np.flatnonzero(weights)[:1].tolist()
        tokens: list[Token] = []
        end = 0  # of what is shown
        for start, stop in _windows(len(ids), borders, limit):
            part = tokens_of(ids[start:stop], weights[start:stop], tokenizer)
            part = [replace(t, is_cut=not kept) for t, kept in zip(part, self.is_kept[start:stop], strict=True)]
            part[0] = replace(part[0], num_hidden=start - end)
            tokens, end = tokens + part, stop
        num_learned = int((weights[self.is_kept] > 0).sum()) if self.reason == CUT else 0
        return ShownSample(self.origin, tokens, len(ids), num_learned, self.remark, reasons=reasons)


def _windows(num: int, borders: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Where to show ``limit`` of ``num`` tokens: the beginning, and around a border of what is kept."""
    if num <= limit or not borders or borders[0] < limit // 2:
        return [(0, min(num, limit))]
    around = borders[0] + 1
    start = max(around - limit // 4, limit // 2)
    return [(0, limit // 2), (start, min(num, start + limit // 2))]


def _find_lost(data: Data, num: int, others: list[int]) -> list[_Lost]:
    """Find samples that were cut or left out: ``num`` for each reason and data set, and all of ``others`` that were."""
    found: list[_Lost] = []
    for number, (store, dataset) in enumerate(zip(data.train.stores, data.datasets, strict=True)):
        counts = store.info["counts"]
        left = {
            CUT: num if counts.get("num_truncated") or counts.get("num_split") else 0,
            LONG: num if counts.get("num_dropped_long") else 0,
            UNSUPERVISED: num if counts.get("num_dropped_unsupervised") else 0,
        }
        longest = [i for i in others if data.train.dataset_ids[i] == number]
        longest = [i for i in longest if data.train.lengths[i] == data.settings.max_length]
        wanted = {data.train.origin(i) for i in longest} if left[CUT] else set()
        for origin, row in _candidates(store, dataset, data.settings.max_length, left, wanted):
            for encoded, *_ in data.encoder.whole(dataset, row):
                lost = _lost(origin, encoded, data.encoder, left)
                if lost and (lost.is_wanted or origin in wanted):
                    found.append(lost)
                    left[lost.reason] -= lost.is_wanted
            wanted.discard(origin)
            if not wanted and not any(left.values()):
                break
    return found


def _lost(origin: str, encoded: Encoded, encoder: Encoder, left: Mapping[str, int]) -> _Lost | None:
    """What became of a sample; None if it was neither cut nor left out."""
    weights = np.array(encoded.weights, np.float32)
    weights[0] = 0
    is_long = len(weights) > encoder.max_length
    is_kept = np.zeros(len(weights), bool)
    for slices in encoder.pieces(encoded.input_ids) if is_long else [[slice(0, len(weights))]]:
        kept = np.concatenate([np.arange(len(weights))[each] for each in slices])
        if weights[kept[1:]].any():
            is_kept[kept] = True
    if is_kept.all():
        return None
    num_cut, num_targets = int((~is_kept).sum()), int((weights[~is_kept] > 0).sum())
    if is_kept.any():
        reason, remark = CUT, f"{counted(num_cut, 'token')} cut off, {num_targets:,} of them would be learned"
    elif is_long and encoder.excess_length_strategy == "drop":
        reason, remark = LONG, f"left out: {len(weights):,} tokens, max_length is {encoder.max_length:,}"
    elif num_targets:
        first = int(np.flatnonzero(weights)[0]) + 1
        reason = UNSUPERVISED
        remark = f"left out: what is learned begins at token {first:,}, and is cut off at {encoder.max_length:,}"
    else:
        reason, remark = UNSUPERVISED, "left out: no token of it is learned"
    return _Lost(origin, reason, encoded, is_kept, remark, left[reason] > 0)


def _candidates(
    store: Store, dataset: Dataset, max_length: int, left: Mapping[str, int], wanted: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows that may have been cut, until ``left`` says that it is enough, and those that made no sample."""
    samples = store.arrays["samples"]
    skipped = {(row.part, row.number) for row in store.skipped.rows}
    num_read = 0
    for number, part in enumerate(store.source.parts):
        own = samples[samples["part"] == number]
        made, longest = np.unique(own["number"]), np.unique(own["number"][own["length"] == max_length])
        for block in part.blocks(dataset.columns):
            end = block.first + block.num_rows
            num_made, num_longest = (
                np.subtract(*np.searchsorted(each, [end, block.first])) for each in (made, longest)
            )
            may_be_cut = bool(num_longest) and (left[CUT] > 0 or bool(wanted))
            may_be_absent = num_made < block.num_rows and (left[LONG] > 0 or left[UNSUPERVISED] > 0)
            num_read += block.num_rows
            if num_read > MAX_ROWS_READ:
                return
            if not may_be_cut and not may_be_absent:
                continue
            for row_number, row in part.rows(block):
                if not isinstance(row, dict) or (number, row_number) in skipped:
                    continue
                origin = store.source.origin(number, row_number)
                if not _has(made, row_number):
                    is_asked = may_be_absent and (left[LONG] > 0 or left[UNSUPERVISED] > 0)
                else:
                    is_asked = _has(longest, row_number) and (left[CUT] > 0 or origin in wanted)
                if is_asked:
                    yield origin, row


def _has(ordered: np.ndarray, value: int) -> bool:
    at = int(np.searchsorted(ordered, value))
    return at < len(ordered) and ordered[at] == value


def _skipped_rows(data: Data, num: int) -> list[ShownSample]:
    """Rows that cannot be used: the first ``num`` of each problem, with what the data say there."""
    found: list[ShownSample] = []
    for store in data.train.stores:
        by_problem: dict[tuple[str, str], list[BadRow]] = {}
        for bad in store.skipped.rows:
            kind = "".join(" " if c.isdigit() else c for c in bad.problem.found), bad.problem.expected
            by_problem.setdefault(kind, []).append(bad)
        kinds = [same[:num] for same in list(by_problem.values())[:MAX_SKIP_REASONS]]
        rows = [row for same in zip_longest(*kinds) for row in same if row]  # the first of each problem first
        texts = _texts_of(store, {(row.part, row.number) for row in rows})
        for row in rows:
            remark = str(row.problem).split("\n")[0].removeprefix(": ")
            text = texts.get((row.part, row.number), "") or "(not readable as a row)"
            found.append(ShownSample(row.origin, [], 0, 0, remark, text, [SKIPPED]))
    return found


def _texts_of(store: Store, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """The content of rows as JSON, by part and number; of what is no row, nothing."""
    texts = {}
    for number, part in enumerate(store.source.parts):
        if not any(of_part == number for of_part, _ in wanted):
            continue
        for block in part.blocks():
            if any((number, n) in wanted for n in range(block.first, block.first + block.num_rows)):
                for row_number, row in part.rows(block):
                    if (number, row_number) in wanted and isinstance(row, dict):
                        text = json.dumps(row, ensure_ascii=False, default=str)
                        more = "..." if len(text) > MAX_ROW_CHARACTERS else ""
                        texts[number, row_number] = text[:MAX_ROW_CHARACTERS] + more
    return texts


def _shown(train: Samples, i: int, tokenizer: Any, limit: int, reasons: list[str]) -> ShownSample:
    ids, weights = train[i]
    weights[0] = 0  # the first token has no token before it that predicts it
    tokens = tokens_of(ids[:limit], weights, tokenizer)
    return ShownSample(train.origin(i), tokens, len(ids), int(train.num_targets[i]), reasons=reasons)


def tokens_of(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> list[Token]:
    """Decode token by token.

    The texts of the tokens, joined, are the decoded sample with its control characters made visible. If a character
    consists of several tokens, the last of them has it as its text.

    Args:
        ids: [T].
        weights: [T] or longer, of each token in the loss.
    """
    special = set(tokenizer.all_special_ids) | {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    stream = DecodeStream(skip_special_tokens=False)
    tokens, text = [], None
    for id_, weight in zip(ids.tolist(), weights.tolist(), strict=False):
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


def runs_of(tokens: list[Token]) -> list[list[Token]]:
    """Group consecutive tokens of equal weight, all of them kept or all of them cut."""
    runs: list[list[Token]] = []
    for token in tokens:
        if runs and _kind(runs[-1][-1]) == _kind(token) and not token.num_hidden:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs


def _kind(token: Token) -> tuple[float, bool]:
    return token.weight, token.is_cut
