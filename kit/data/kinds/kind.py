"""The protocol of a dataset type: how its rows are read, encoded, truncated and stored for an objective."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from kit.data.chat.formats import Format, Sample
from kit.data.chat.tokens import Encoded
from kit.system.errors import Problem

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings

START_CUT = "their start was truncated, because excess_length_strategy is keep_end"
# Those of one sample: of a pair the prompt with each of its answers; of contrastive rows anchor, positive, negatives.
Sequences = tuple[Encoded, ...]


@dataclass(frozen=True)
class Limits:
    """The maximum length of a sequence, and what truncation must know."""

    max_length: int  # tokens
    strategy: str  # ``excess_length_strategy``
    bos: int | None
    special: frozenset[int]  # all ids of special and added tokens


class Stored(Protocol):
    """What a kind reads of its samples, see ``kit.data.samples.records.Table``."""

    lengths: np.ndarray
    num_targets: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """See ``Table``."""

    @property
    def sequence_lengths(self) -> np.ndarray:
        """See ``Table``."""

    def __len__(self) -> int:
        """Return the number of samples."""


@dataclass(frozen=True)
class RowKind:
    """A dataset type: how its rows are read, encoded and stored. Each subclass is one.

    Attributes:
        formats: in order of precedence: the first one whose columns are all there is taken.
        objective: the objective that takes such rows, for messages.
        answers: the keys of a sample that hold answers to one prompt.
        is_demonstration: answers to imitate, as for SFT; else preferences, labels or contrastive texts.
        pools: hidden states of the tokens with a weight are pooled; else these tokens are targets.
        is_cut: a sample that is longer than ``max_length`` is truncated, or left out.
        has_mismatched: the objective also needs mismatched prompt-completion pairs (``feed.mismatched``).
        compares_answers: to one prompt, so that length bias can be measured.
        too_few: the expected number of samples, if one is too few.
        token_name: the name of tokens with a weight in a summary.
    """

    formats: ClassVar[tuple[Format, ...]]
    objective: ClassVar[str]
    answers: ClassVar[tuple[str, ...]] = ()
    is_demonstration: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    is_cut: ClassVar[bool] = True
    has_mismatched: ClassVar[bool] = False
    compares_answers: ClassVar[bool] = False
    too_few: ClassVar[str] = ""
    token_name: ClassVar[str] = "supervised"

    @classmethod
    def of(cls, settings: "ObjectiveSettings") -> Self:
        """Return the kind as ``settings`` ask for it."""
        return cls()

    @classmethod
    def format_of(cls, fields: Mapping[str, str]) -> Format:
        """Return the format that ``choose_fields`` chose: ``fields`` begin with its first column, and have all."""
        first = next(iter(fields))
        return next(each for each in cls.formats if each.columns[0] == first and set(each.columns) <= fields.keys())

    def key(self) -> list[Any]:
        """Return the part of a cache key that identifies it."""
        return [type(self).__name__, *astuple(self)]

    def check(self, sample: Sample) -> Problem | None:
        """Return the problem of a sample before it is encoded."""
        return None

    def parts(self, sample: Sample) -> list[Sample]:
        """Return the samples that are encoded for ``sample``."""
        return [sample]

    def join(self, sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Sequences] | Problem:
        """Return the samples that the encoded parts of a row make, or why it cannot be trained on."""
        raise NotImplementedError

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """Cut a sample that is too long, which may leave none or several. Returns a remark for the user, too."""
        raise NotImplementedError

    def weighted(self, sample: Sample, sequences: Sequences) -> Sequences | None:
        """Return the sequences of a sample with their final weights; None if no token is supervised."""
        return sequences if any(sequences[0].weights[1:]) else None

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """Return the numbers that are stored with the tokens of a sample: where the answer to generate is, first."""
        return list(answer_span(sequences[0].weights))

    def per_sequence(self, table: Stored, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return what an objective needs of n sequences, by name; see ``MicroBatch.per_sequence``.

        Args:
            members: int64 [n], of each sequence the index of its sample.
            numbers: int64 [n], its number in that sample.
        """
        return {}

    def chosen_weight(self, table: Stored, indices: np.ndarray) -> float:
        """Return the sum of the weights of targets in chosen answers, of the samples at ``indices``."""
        return 0.0

    def hashes(self, table: Stored, of_ids: np.ndarray) -> np.ndarray:
        """Return a hash of each sample, uint64 [N], equal for duplicates.

        Args:
            of_ids: uint64 [N], a hash of the ids of each.
        """
        return of_ids

    def summary(self, table: Stored) -> list[str]:
        """Return lines for the user about training data."""
        num_tokens, num_targets = (int(each.sum(dtype=np.int64)) for each in (table.lengths, table.num_targets))
        found = f"{num_tokens} tokens, {num_targets} of them {self.token_name} ({num_targets / num_tokens:.1%})"
        return [f"training data: {len(table)} samples, {found}"]

    def names(self, table: Stored, i: int) -> list[str]:
        """Return what each sequence of sample ``i`` is called."""
        return list(self.answers) if len(self.answers) > 1 else [""]

    def is_bad(self, table: Stored, i: int, name: str) -> bool:
        """Return whether the sequence of sample ``i`` with this name is to become less likely."""
        return name in ("rejected", "negative")

    def about(self, table: Stored, i: int) -> str:
        """Return the text shown after the tokens of sample ``i``."""
        return ""


def answer_span(weights: Sequence[float]) -> tuple[int, int]:
    """Return where the last span of tokens with a weight begins and ends."""
    end = next(i for i in range(len(weights), 0, -1) if weights[i - 1])
    return next((i for i in range(end, 0, -1) if not weights[i - 1]), 0), end
