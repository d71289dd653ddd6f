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

from kit.data.chat.unused import read_keys, without_keys
from kit.data.open import Data
from kit.data.samples.bad_rows import BadRow
from kit.data.samples.dataset import Dataset
from kit.data.samples.halves import Halves, first_target, without_start_of_prompt
from kit.data.samples.rows import Encoder
from kit.data.samples.samples import Samples, Store
from kit.secrets import secret_spans
from kit.tools.report.data_checks import REASONS, Finding, counted
from kit.tools.report.differences import differing
from kit.visible import visible

MAX_TOKENS_SHOWN = 4000  # of one sample
MIN_TOKENS_SHOWN = 256  # of one sample, if there are many
MAX_TOKENS_COMPARED = 2000  # of each answer of a pair, also if fewer of them are shown
MAX_TOKENS_OF_LEFT_OUT = 600  # of one that was left out as a whole
MAX_TOKENS_IN_ALL = 200_000
MAX_ROW_CHARACTERS = 2000  # shown of a row that cannot be used
MAX_ROWS_READ = 1_000_000  # again, to find what was cut or left out
MAX_SKIP_REASONS = 10
MAX_TOKENS_BEFORE = 8  # of a part, with which its first tokens are decoded
CUT, LONG, UNSUPERVISED, SKIPPED, SPREAD = "cut", "too-long", "nothing-learned", "skipped", "spread"
LONGEST, SHORTEST, LEAST = "longest", "shortest", "least-learned"
CHOSEN_LONGER, REJECTED_LONGER = "chosen-longer", "rejected-longer"
TRUE, FALSE = "label-true", "label-false"


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str  # empty if more tokens are needed to complete a character
    weight: float  # in the loss; 0: not supervised
    is_special: bool
    is_cut: bool = False  # not in the sample, because of its length
    num_hidden: int = 0  # tokens before it that are not shown
    differs: bool = False  # from the other answer of the pair


@dataclass(frozen=True)
class ShownAnswer:
    """One of the two answers of a pair as it is shown, without the prompt."""

    name: str  # chosen, rejected
    tokens: list[Token]  # those that are shown
    num_tokens: int  # of the whole answer


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is shown, or a row of which no sample was made."""

    origin: str  # ``file:line``
    tokens: list[Token]  # those that are shown; of a pair those of the prompt, which its answers have in common
    num_tokens: int  # of the whole sample or prompt, with those that were cut
    num_learned: int  # supervised tokens that the model learns
    remark: str = ""  # what happened to it
    row: str = ""  # as it stands in the data, if it cannot be used
    reasons: list[str] = field(default_factory=list)  # why it is shown: keys
    answers: Sequence[ShownAnswer] = ()  # of a pair
    label: bool | None = None  # of an answer with a label

    @property
    def about(self) -> str:
        """Its numbers of tokens, and its label, as text."""
        if self.row:
            return "cannot be used"
        if self.answers:
            lengths = (f"{answer.name} {answer.num_tokens:,}" for answer in self.answers)
            return f"prompt {counted(self.num_tokens, 'token')}, {', '.join(lengths)}"
        share = f"{self.num_learned / self.num_tokens:.0%}"
        label = "" if self.label is None else f", label {str(self.label).lower()}"
        return f"{counted(self.num_tokens, 'token')}, {self.num_learned:,} learned ({share}){label}"


def more_tokens(shown: ShownSample | ShownAnswer) -> str:
    """Return how many tokens behind the last one are not shown, as text; empty if there are none."""
    num = shown.num_tokens - len(shown.tokens) - sum(token.num_hidden for token in shown.tokens)
    return counted(num, "more token") if num else ""


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
        yield from self._found_of_preferences(train, num)
        shares = train.num_targets / train.lengths
        for key, label, values in (
            (LONGEST, "longest", -train.row_lengths),
            (SHORTEST, "shortest", train.row_lengths),
            (LEAST, "smallest share learned", shares),
        ):
            self.reasons.append(Reason(key, label))
            yield from ((i, key) for i in _least(values, num))
        if len(train.stores) > 1:
            for number, name in enumerate(train.dataset_names):
                own = np.flatnonzero(train.dataset_ids == number)
                self.reasons.append(Reason(f"data-{number + 1}", f"data set {name}", len(own)))
                yield from ((i, f"data-{number + 1}") for i in _evenly(own, num))

    def _found_of_preferences(self, train: Samples, num: int) -> Iterator[tuple[int, str]]:
        """The same for what only pairs or answers with a label have."""
        if train.labels is None:
            return
        if train.are_rated:
            for key, has_label in ((TRUE, train.labels), (FALSE, ~train.labels)):
                own = np.flatnonzero(has_label)
                self.reasons += [Reason(key, key.replace("-", " "), len(own))] if len(own) else []
                yield from ((i, key) for i in _evenly(own, num))
            return
        longer = train.sequence_lengths[:, 0] - train.sequence_lengths[:, 1]
        for key, label, surplus in (
            (CHOSEN_LONGER, "chosen is longer", longer),
            (REJECTED_LONGER, "rejected is longer", -longer),
        ):
            num_longer = int((surplus > 0).sum())
            self.reasons += [Reason(key, label, num_longer)] if num_longer else []
            yield from ((i, key) for i in _least(-surplus, min(num, num_longer)))


def _least(values: np.ndarray, num: int) -> list[int]:
    """The indices of the ``num`` smallest values, in their order."""
    if not num:
        return []
    few = np.argpartition(values, min(num, len(values)) - 1)[:num]
    ordered: list[int] = few[np.argsort(values[few], kind="stable")].tolist()
    return ordered


def _evenly(indices: np.ndarray, num: int) -> list[int]:
    """``num`` of the indices, spread evenly."""
    chosen: list[int] = indices[np.linspace(0, len(indices) - 1, min(num, len(indices))).astype(int)].tolist()
    return chosen


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
    halves: Halves  # without the cut: of a pair the prompt with each answer, of any other sample one
    are_kept: tuple[np.ndarray, ...]  # of each half bool [T]: which tokens the model sees
    remark: str
    is_wanted: bool  # for its reason, and not only because it was chosen for another one
    label: bool | None = None

    @property
    def ids_left(self) -> bytes:
        """The ids that the model sees of it."""
        pairs = zip(self.halves, self.are_kept, strict=True)
        return np.concatenate([np.array(half.input_ids, np.int32)[kept] for half, kept in pairs]).tobytes()

    def shown(self, tokenizer: Any, limit: int, reasons: list[str]) -> ShownSample:
        sequences = [(np.array(half.input_ids), np.array(half.weights, np.float32)) for half in self.halves]
        limit = limit if self.reason == CUT else min(limit, MAX_TOKENS_OF_LEFT_OUT)
        shown = _sample(self.origin, sequences, self.are_kept, tokenizer, limit, reasons)
        return replace(shown, remark=self.remark, label=self.label)


def _sample(
    origin: str,
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    are_kept: Sequence[np.ndarray],
    tokenizer: Any,
    limit: int,
    reasons: list[str],
) -> ShownSample:
    """Return a sample as it is shown.

    Args:
        sequences: ids [T] and weights [T]; of a pair those of both halves.
        are_kept: for each sequence bool [T]: which tokens the model sees.
        limit: tokens to show.
    """
    for _, weights in sequences:
        weights[0] = 0  # the first token has no token before it that predicts it
    num_learned = sum(int((w[kept] > 0).sum()) for (_, w), kept in zip(sequences, are_kept, strict=True))
    (ids, weights), kept = sequences[0], are_kept[0]
    if len(sequences) == 1:
        # Of what was left out, the reader looks for where it begins to be learned.
        borders = np.flatnonzero(np.diff(kept))[-1:] if kept.any() else np.flatnonzero(weights)[:1]
        tokens = _tokens(ids, weights, kept, slice(0, len(ids)), tokenizer, limit, borders.tolist())
        return ShownSample(origin, tokens, len(ids), num_learned, reasons=reasons)
    limit //= 3
    num_prompt = first_target(weights.tolist())
    borders = np.append(num_prompt - 1, np.flatnonzero(np.diff(kept[:num_prompt])))[-1:]  # the end, if nothing was cut
    prompt = _tokens(ids, weights, kept, slice(0, num_prompt), tokenizer, limit, borders.tolist())
    compared = slice(num_prompt, num_prompt + max(limit, MAX_TOKENS_COMPARED))
    differ = differing(*(ids[compared] for ids, _ in sequences))
    answers = []
    for name, (ids, weights), kept, differs in zip(("chosen", "rejected"), sequences, are_kept, differ, strict=True):
        tokens = _tokens(ids, weights, kept, slice(num_prompt, len(ids)), tokenizer, limit, [])
        tokens = [replace(token, differs=bool(d)) for token, d in zip(tokens, differs, strict=False)]
        answers.append(ShownAnswer(name, tokens, len(ids) - num_prompt))
    return ShownSample(origin, prompt, num_prompt, num_learned, reasons=reasons, answers=answers)


def _tokens(
    ids: np.ndarray,
    weights: np.ndarray,
    is_kept: np.ndarray,
    part: slice,
    tokenizer: Any,
    limit: int,
    borders: Sequence[int],
) -> list[Token]:
    """Return ``limit`` tokens of a part of a sequence as they are shown: its beginning, and around a border."""
    tokens: list[Token] = []
    end = part.start  # of what is shown
    for first, last in _windows(part.stop - part.start, [border - part.start for border in borders], limit):
        start, stop = part.start + first, part.start + last
        before = min(start, MAX_TOKENS_BEFORE)  # a token's text may depend on those before it
        decoded = tokens_of(ids[start - before : stop], weights[start - before : stop], tokenizer)[before:]
        decoded = [replace(t, is_cut=not kept) for t, kept in zip(decoded, is_kept[start:stop], strict=True)]
        decoded[0] = replace(decoded[0], num_hidden=start - end)
        tokens, end = tokens + decoded, stop
    return tokens


def _windows(num: int, borders: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Where to show ``limit`` of ``num`` tokens: the beginning, and around a border of what is kept."""
    if num <= limit or not borders or borders[0] < limit // 2:
        return [(0, min(num, limit))]
    around = borders[0] + 1
    start = min(max(around - limit // 4, limit // 2), num - limit // 2)
    return [(0, limit // 2), (start, start + limit // 2)]


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
        longest = [i for i in longest if data.train.row_lengths[i] == data.settings.max_length]
        wanted = {data.train.origin(i) for i in longest} if left[CUT] else set()
        for origin, row in _candidates(store, dataset, data.settings.max_length, left, wanted):
            for halves in data.encoder.whole(dataset, row):
                lost = _lost(origin, halves, data.encoder, left)
                if lost and (lost.is_wanted or origin in wanted):
                    found.append(replace(lost, label=_label(dataset, row)))
                    left[lost.reason] -= lost.is_wanted
            wanted.discard(origin)
            if not wanted and not any(left.values()):
                break
    return found


def _label(dataset: Dataset, row: dict[str, Any]) -> bool | None:
    """The label of a row that can be used; None if its format has none."""
    sample = dataset.sample(without_keys(row, read_keys(dataset.ignored)))
    return None if isinstance(sample, list) else sample.get("label")


def _lost(origin: str, halves: Halves, encoder: Encoder, left: Mapping[str, int]) -> _Lost | None:
    """What became of a sample; None if it was neither cut nor left out."""
    lose = _cut_anywhere if encoder.wanted == "answers" else _cut_alike
    are_kept, reason, remark = lose(halves, encoder)
    if all(kept.all() for kept in are_kept):
        return None
    return _Lost(origin, reason, halves, are_kept, remark, left[reason] > 0)


def _cut_anywhere(halves: Halves, encoder: Encoder) -> tuple[tuple[np.ndarray, ...], str, str]:
    """What became of a sample that is cut as ``Encoder.pieces`` says.

    Returns:
        Which tokens are kept (bool [T] of its one sequence), the key of the reason, and a remark.
    """
    (encoded,) = halves
    weights = np.array(encoded.weights, np.float32)
    weights[0] = 0
    is_long = len(weights) > encoder.max_length
    is_kept = np.zeros(len(weights), bool)
    for slices in encoder.pieces(encoded.input_ids) if is_long else [[slice(0, len(weights))]]:
        kept = np.concatenate([np.arange(len(weights))[each] for each in slices])
        if weights[kept[1:]].any():
            is_kept[kept] = True
    num_cut, num_targets = int((~is_kept).sum()), int((weights[~is_kept] > 0).sum())
    if is_kept.any():
        return (is_kept,), CUT, f"{counted(num_cut, 'token')} cut off, {num_targets:,} of them would be learned"
    if is_long and encoder.excess_length_strategy == "drop":
        return (is_kept,), LONG, f"left out: {len(weights):,} tokens, max_length is {encoder.max_length:,}"
    if num_targets:
        first = int(np.flatnonzero(weights)[0]) + 1
        remark = f"left out: what is learned begins at token {first:,}, and is cut off at {encoder.max_length:,}"
        return (is_kept,), UNSUPERVISED, remark
    return (is_kept,), UNSUPERVISED, "left out: no token of it is learned"


def _cut_alike(halves: Halves, encoder: Encoder) -> tuple[tuple[np.ndarray, ...], str, str]:
    """The same for answers of which only the prompt is cut: which tokens are kept is of each half."""
    are_kept = tuple(np.ones(len(half.input_ids), bool) for half in halves)
    num_tokens, bos = max(map(len, are_kept)), encoder.tokenizer.bos_token_id
    if num_tokens <= encoder.max_length:
        return are_kept, CUT, ""
    may_cut = encoder.excess_length_strategy != "drop"
    if may_cut and without_start_of_prompt(halves, encoder.max_length, bos):
        num_cut = num_tokens - encoder.max_length
        start = 1 if halves[0].input_ids[0] == bos else 0  # BOS stays
        for kept in are_kept:
            kept[start : start + num_cut] = False
        return are_kept, CUT, f"{counted(num_cut, 'token')} of the prompt cut off, so that no answer is cut"
    remark = f"left out: {num_tokens:,} tokens, max_length is {encoder.max_length:,}"
    remark += ", and the answer leaves no room for a prompt" if may_cut else ""
    return tuple(np.zeros_like(kept) for kept in are_kept), LONG, remark


def _candidates(
    store: Store, dataset: Dataset, max_length: int, left: Mapping[str, int], wanted: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows that may have been cut, until ``left`` says that it is enough, and those that made no sample."""
    samples = store.arrays["samples"]
    row_lengths = samples["length"]
    if "preferences" in store.arrays:
        firsts = store.arrays["preferences"]["first_length"]
        row_lengths = np.maximum(firsts, row_lengths - firsts)
    skipped = {(row.part, row.number) for row in store.skipped.rows}
    num_read = 0
    for number, part in enumerate(store.source.parts):
        is_own = samples["part"] == number
        made = np.unique(samples["number"][is_own])
        longest = np.unique(samples["number"][is_own & (row_lengths == max_length)])
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
    sequences = train.sequences(i)
    are_kept = [np.ones(len(ids), bool) for ids, _ in sequences]
    label = bool(train.labels[i]) if train.are_rated and train.labels is not None else None
    return replace(_sample(train.origin(i), sequences, are_kept, tokenizer, limit, reasons), label=label)


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
