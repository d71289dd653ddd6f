"""Tokenised samples as a run sees them: all those of one or several cache entries, or some of them. Read-only."""

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from kit.data.chat.messages import Message
from kit.data.chat.tokens import MediaCodec
from kit.data.kinds.kind import RowKind
from kit.data.media import Media
from kit.data.read.sources import Source, read_rows
from kit.data.samples.bad_rows import LOSSES, unused_shares
from kit.data.samples.records import StoredMedia, Table, in_rows
from kit.system.cache import digest

_LOOKED_AT = 1000  # samples of which the tokens of images are counted


@dataclass(frozen=True)
class Store:
    """The samples of one dataset: N samples with T tokens in all, memory-mapped from a cache entry."""

    source: Source
    name: str  # in metrics and tables
    kind: RowKind
    # samples SAMPLE [N], input_ids int32 [T], weights float32 [T]; sequence_lengths and values, see ``as_columns``
    arrays: Mapping[str, np.ndarray]
    info: Mapping[str, Any]  # the contents of the cache entry without arrays: counts, remarks
    fingerprint: str  # of its samples: they depend on the rows that are read, how, and which are skipped
    prompt_of: Callable[[Any], list[Message]]  # see ``Encoder.prompt``
    media: MediaCodec | None = None  # if there are images or audio
    media_folder: str | None = None  # to which the paths of media are relative; None: the folder of the data file

    @cached_property
    def stored_media(self) -> StoredMedia:
        """The media of its samples, if there are any."""
        return StoredMedia(self.arrays)

    @property
    def report(self) -> dict[str, Any]:
        """How many rows the dataset has, and what became of them, including those held out for evaluation."""
        return {
            "name": self.name,
            "num_samples": len(self.arrays["samples"]),
            "num_rows": 0,
            **dict.fromkeys((*LOSSES, "num_blank_lines"), 0),
            **self.info["counts"],
            "num_skipped": len(self.skipped),
            "commit": self.source.commit,
        }

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The rows that were left out because they cannot be used, see ``bad_rows.listed``."""
        skipped: list[dict[str, Any]] = self.info["skipped"]
        return skipped

    @property
    def unused(self) -> dict[str, float]:
        """See ``unused_shares``."""
        return unused_shares(self.info)


class DataRows:
    """Rows by the index of their sample, in a temporary file: together they may be larger than the memory."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 it ends with this object
        self._starts: dict[int, int] = {}

    def __contains__(self, i: int) -> bool:
        return i in self._starts

    def add(self, i: int, row: Any) -> None:
        """Store the row of sample ``i``."""
        self._starts[i] = self._file.seek(0, 2)
        pickle.dump(row, self._file)

    def get(self, i: int) -> Any:
        """Return the row of sample ``i``, a new copy each time."""
        self._file.seek(self._starts[i])
        return pickle.load(self._file)


class Prompt(NamedTuple):
    """A prompt and its reference answer: the ids before the last span of supervised tokens, and those of the span."""

    ids: list[int]
    reference: list[int]


class Samples(Table):
    """Samples of one or several stores.

    Attributes:
        stores: where the samples are from, one for each dataset.
        fingerprint: identifies the ids, the weights and their order. The same on every machine.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        fingerprint: str = "",
        index: np.ndarray | None = None,
        dataset_ids: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            index: int [N], the chosen samples among those of all stores; None: all of them.
            dataset_ids: of each store the index of its dataset; None: its own.
        """
        self.stores = list(stores)
        self.fingerprint = fingerprint or digest(*(store.fingerprint for store in stores))
        sizes = [len(store.arrays["samples"]) for store in stores]
        self._firsts = np.cumsum([0, *sizes])
        self._index = index
        columns = {name: self._column(name) for name in ("length", "num_targets", "target_weight")}
        of_stores = np.array(range(len(sizes)) if dataset_ids is None else dataset_ids, np.int16)
        super().__init__(columns, self._chosen(np.repeat(of_stores, sizes)), stores[0].kind)
        codecs = [store.media for store in stores if store.media]
        self.media_codec = reduce(or_, codecs) if codecs else None

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """See ``Table``."""
        return self._chosen(in_rows([store.arrays for store in self.stores], "sequence_length", 0))

    @cached_property
    def values(self) -> np.ndarray:
        """See ``Table``."""
        return self._chosen(in_rows([store.arrays for store in self.stores], "value", np.nan))

    def _column(self, name: str) -> np.ndarray:
        return self._chosen(np.concatenate([store.arrays["samples"][name] for store in self.stores]))

    def _chosen(self, values: np.ndarray) -> np.ndarray:
        """The values of the chosen samples, from those of all samples in the stores."""
        return values if self._index is None else values[self._index]

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        store, number = self._find(i)
        sample = store.arrays["samples"][number]
        start, end = sample["start"], sample["start"] + sample["length"]
        return store.arrays["input_ids"][start:end], store.arrays["weights"][start:end]

    def _find(self, i: int) -> tuple[Store, int]:
        """The store of sample ``i``, and its index there."""
        in_all = int(i if self._index is None else self._index[i])
        k = int(np.searchsorted(self._firsts, in_all, side="right")) - 1
        return self.stores[k], in_all - int(self._firsts[k])

    def _place(self, i: int) -> tuple[Source, int, int]:
        """The source of sample ``i``, the number of its part, and that of its row there."""
        store, number = self._find(i)
        sample = store.arrays["samples"][number]
        return store.source, int(sample["part"]), int(sample["number"])

    def origin(self, i: int) -> str:
        """Where sample ``i`` comes from: ``train.jsonl:17``."""
        source, part, number = self._place(i)
        return source.origin(part, number)

    def data_rows(self, index: Sequence[int]) -> DataRows:
        """Return the rows that the samples at ``index`` are from: all columns, read again from the dataset.

        They are kept, because an evaluation asks for the same ones each time.
        """
        parts: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i in index:
            if i not in self._data_rows:
                _, part, number = self._place(i)
                parts[self.dataset_ids[i], part][number].append(i)
        for (dataset_id, part), samples_of in sorted(parts.items()):
            for _, number, row in read_rows([self.stores[dataset_id].source.parts[part]]):
                for i in samples_of.pop(number, ()):
                    self._data_rows.add(i, row)
                if not samples_of:
                    break
        return self._data_rows

    @cached_property
    def _data_rows(self) -> DataRows:
        return DataRows()

    def media(self, i: int) -> list[tuple[Media, str]]:
        """Return the media of sample ``i``, each with the folder to which its path is relative."""
        store, number = self._find(i)
        if store.media is None:
            return []
        source, part, _ = self._place(i)
        folder = store.media_folder or source.parts[part].folder
        return [(each, folder) for each in store.stored_media[number]]

    def prompt(self, i: int) -> Prompt:
        """Return the prompt and the reference of sample ``i``; of a pair, the chosen answer."""
        start, end = self.answer_spans[i].tolist()
        ids, _ = self[i]
        return Prompt(ids[:start].tolist(), ids[start:end].tolist())

    def prompt_messages(self, i: int) -> list[Message]:
        """Return the messages of which the chat template makes the prompt of sample ``i``, from a row of messages."""
        return self._find(i)[0].prompt_of(self.data_rows([i]).get(i))

    @cached_property
    def answer_spans(self) -> np.ndarray:
        """Where the answer begins and ends that the model is asked for, int64 [N, 2]: the last supervised span."""
        return self.values[:, :2].astype(np.int64)

    @property
    def without_reference(self) -> np.ndarray:
        """The indices of prompts alone, int64 [M]: see ``kit.data.kinds.prompts``."""
        return np.flatnonzero(self.num_targets == 0)

    def shown(self, prompt: str) -> str:
        """Return the text of a prompt, with one placeholder for each image."""
        return self.media_codec.shown(prompt) if self.media_codec else prompt

    def image_tokens(self, pack_length: int | None) -> int:
        """Return how many tokens of a sequence stand for images, at most; or of packs, how many of ``pack_length``.

        The longest samples with images are looked at, not all.
        """
        if (codec := self.media_codec) is None:
            return 0
        counts = [store.arrays.get("media_counts", np.zeros(len(store.arrays["samples"]))) for store in self.stores]
        having = np.flatnonzero(self._chosen(np.concatenate(counts)))
        if not len(having):
            return 0
        longest = having[np.argsort(-self.lengths[having], kind="stable")[:_LOOKED_AT]]
        found = [int(np.isin(self[i][0], [*codec.placeholder_ids]).sum()) for i in longest.tolist()]
        if pack_length is None:
            return max(found) // self.sequence_lengths.shape[1]
        return pack_length * sum(found) // int(self.lengths[longest].sum(dtype=np.int64))

    def media_with_origin(self, i: int) -> list[tuple[Media, str, str]]:
        """See ``Table``."""
        return [(*each, self.origin(i)) for each in self.media(i)]

    def select(self, index: np.ndarray, reason: str) -> "Samples":
        """The samples at ``index`` (int [M]), in that order. ``reason`` identifies the choice in the fingerprint."""
        chosen = index if self._index is None else self._index[index]
        return Samples(self.stores, digest(self.fingerprint, reason), chosen)

    @property
    def hashes(self) -> np.ndarray:
        """A hash of the ids of each sample, uint64 [N]."""
        return self._column("ids_hash")

    @property
    def dataset_names(self) -> list[str]:
        """The names of the datasets, for metrics and tables."""
        return [store.name for store in self.stores]

    def rows(self) -> np.ndarray:
        """The row that each sample is from, int64 [N], numbered from 0 over all datasets.

        Assumes that the samples of one row follow one another, as they do until samples are selected.
        """
        keys = np.stack([self.dataset_ids, self._column("part"), self._column("number")])
        is_next = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return np.concatenate([[0], np.cumsum(is_next)])

    @property
    def report(self) -> dict[str, Any]:
        """What the data are, and their size in samples and tokens."""
        return {
            "fingerprint": self.fingerprint,
            "num_samples": len(self),
            "num_tokens": int(self.lengths.sum(dtype=np.int64)),
            "num_supervised_tokens": int(self.num_targets.sum(dtype=np.int64)),
        }


def duplicates(evaluation: Samples, train: Samples) -> int:
    """How many evaluation samples have the same tokens as one of the training data."""
    own, wanted = train.hashes, np.unique(evaluation.hashes)
    at = np.searchsorted(wanted, own).clip(max=len(wanted) - 1)  # sorts the few, not all samples
    return int(np.isin(evaluation.hashes, own[wanted[at] == own]).sum())
