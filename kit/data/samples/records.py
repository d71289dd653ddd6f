"""The record of each sample: lengths, supervised tokens, origin."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from kit.data.chat.tokens import MediaCodec
from kit.data.kinds.answers import ANSWER_ROWS
from kit.data.kinds.kind import RowKind
from kit.data.media import KINDS, Media

# One sample in the cache.
SAMPLE = np.dtype(
    [
        ("start", "<i8"),  # index of its first token among those of all samples
        ("length", "<i4"),  # tokens
        ("part", "<i4"),  # index of the part of the source, usually a file
        ("number", "<i8"),  # line or row in that part, from 1
        ("num_targets", "<i4"),  # supervised tokens that have a token before them
        ("target_weight", "<f8"),  # sum of their weights
        ("ids_hash", "<u8"),
    ]
)
# An image or audio of a sample, and where its content, or its path in UTF-8, is in ``media_data``.
MEDIA = np.dtype(
    [
        ("start", "<i8"),
        ("num_bytes", "<i4"),
        ("kind", "u1"),  # index in KINDS
        ("is_path", "u1"),
        ("size", "<i8", 2),
        ("digest", "<u8"),  # see ``kit.data.media.Media``
        ("stamp", "<u8"),
    ]
)


class StoredMedia:
    """The media of samples, from the arrays ``media``, ``media_counts`` and ``media_data`` of a cache entry."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._media, self._data = arrays["media"], arrays["media_data"]
        self._firsts = np.concatenate([[0], np.cumsum(arrays["media_counts"], dtype=np.int64)])

    def __getitem__(self, i: int) -> list[Media]:
        """Return those of sample ``i``."""
        found = []
        for each in self._media[self._firsts[i] : self._firsts[i + 1]]:
            data = self._data[each["start"] : each["start"] + each["num_bytes"]].tobytes()
            about = KINDS[each["kind"]], data, bool(each["is_path"]), tuple(each["size"].tolist())
            found.append(Media(*about, int(each["digest"]), int(each["stamp"])))
        return found


def as_columns(name: str, rows: Sequence[Sequence[float]], dtype: Any) -> dict[str, np.ndarray]:
    """Return numbers of samples, of each as many as it has, as arrays of a cache entry; ``in_rows`` reads them."""
    return {
        f"{name}s": np.array(list(chain.from_iterable(rows)), dtype),
        f"{name}_counts": np.array(list(map(len, rows)), np.int32),
    }


def in_rows(entries: Sequence[Mapping[str, np.ndarray]], name: str, absent: float) -> np.ndarray:
    """Return numbers of samples of several cache entries, [N, most of one sample]."""
    values, counts = (np.concatenate([arrays[each] for arrays in entries]) for each in (f"{name}s", f"{name}_counts"))
    rows = np.full((len(counts), counts.max(initial=0)), absent, values.dtype)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = values
    return rows


class Table:
    """Samples, by their records. ``table[i]`` is ``(input_ids [T], weights float32 [T])``; subclasses have the tokens.

    A weight is that of the token in the loss; 0 masks it out. A sample is one or several sequences of tokens, one after
    the other.

    Attributes:
        lengths: int32 [N], the number of tokens of each sample.
        num_targets: int32 [N], the number of its supervised tokens that have a token before them.
        target_weights: float64 [N], the sum of their weights.
        dataset_ids: int [N], the index of its dataset.
        kind: the dataset type of their rows.
        media_codec: None if no sample has images or audio.
    """

    media_codec: MediaCodec | None = None

    def __init__(
        self, records: np.ndarray | Mapping[str, np.ndarray], dataset_ids: np.ndarray, kind: RowKind = ANSWER_ROWS
    ) -> None:
        """
        Args:
            records: SAMPLE [N], or those of its columns that are read here.
        """
        self.lengths = records["length"]
        self.num_targets = records["num_targets"]
        self.target_weights = records["target_weight"]
        self.dataset_ids = dataset_ids
        self.kind = kind
        self.attached: dict[str, dict[str, Any]] = {"sequence": {}, "token": {}}

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """The tokens of each sequence, int32 [N, most of one sample]; 0 for one that is not there."""
        return self.lengths[:, None]

    @cached_property
    def values(self) -> np.ndarray:
        """What else the kind knows of each sample, float64 [N, most of one sample]; see ``RowKind.values``."""
        return np.zeros((len(self), 0))

    @property
    def row_lengths(self) -> np.ndarray:
        """The tokens of each sample's longest sequence, int32 [N]: of the rows that it takes without packing."""
        return self.sequence_lengths.max(axis=1)

    def attach(self, name: str, values: Any, per: Literal["sequence", "token"]) -> None:
        """Add numbers that an objective finds by ``name`` in ``MicroBatch.per_sequence`` or ``per_target``.

        They are read when a micro-batch is made: of a run in the feed's thread, so they may be mapped from a disk.

        Args:
            values: per sequence [N, sequences of a sample]; per token of each sample, which has one sequence, those of
                its targets, [num_targets, ...].
        """
        self.attached[per][name] = values

    def per_sequence(self, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return what an objective needs of sequences, by name: of each of ``members`` the one with its number."""
        attached = {name: values[members, numbers] for name, values in self.attached["sequence"].items()}
        return self.kind.per_sequence(self, members, numbers) | attached

    def per_target(self, members: np.ndarray) -> dict[str, np.ndarray]:
        """Return what an objective needs of the targets of ``members``, each of one sequence, by name: [S, ...]."""
        return {
            name: np.concatenate([values[0][:0], *(values[i] for i in members.tolist())])
            for name, values in self.attached["token"].items()
        }

    def media_inputs(self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """Return fields of ``MicroBatch`` for the media of a micro-batch; nothing if no sample has any.

        Args:
            input_ids: int64 [B, T].
            segments: see ``MicroBatch``.

        Raises ``UserError`` if one cannot be decoded.
        """
        if self.media_codec is None:
            return {}
        media = [self.media_with_origin(i) for _, _, i in segments]
        return self.media_codec.inputs(input_ids, segments, media)

    def media_with_origin(self, i: int) -> list[tuple[Media, str, str]]:
        """Return the media of sample ``i``, each with the folder of its path, and where its row is from."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and weights of sample ``i``."""
        raise NotImplementedError

    def sequences(self, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and weights of each sequence of sample ``i``: of a pair the chosen one first."""
        lengths = self.sequence_lengths[i]
        bounds = np.cumsum(lengths[lengths > 0])[:-1]
        return list(zip(*(np.split(values, bounds) for values in self[i]), strict=True))
