"""Tokenised samples as a run sees them: read-only, from one cache entry or several, any choice of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from kit.cache import digest
from kit.data.read.sources import Source

CASUALTIES = ("num_truncated", "num_split", "num_dropped_long", "num_dropped_unsupervised", "num_blank_lines")


@dataclass(frozen=True)
class Store:
    """The samples of one source, as they lie in the cache."""

    source: Source
    name: str  # in metrics and tables
    arrays: Mapping[str, np.ndarray]  # samples SAMPLE [N], input_ids int32 [T], weight_codes uint8 [T]
    info: Mapping[str, Any]
    fingerprint: str

    @property
    def report(self) -> dict[str, Any]:
        """What became of the rows of the source, those held out included."""
        counts = {"num_rows": 0, **dict.fromkeys(CASUALTIES, 0), **self.info["counts"]}
        return {"name": self.name, "num_samples": len(self.arrays["samples"]), **counts}

    def notes(self, max_length: int) -> list[str]:
        """What a user should know about the rows of the source, a line each."""
        counts, name = self.info["counts"], self.source.name
        num_rows, unsupervised = counts["num_rows"], counts.get("num_dropped_unsupervised", 0)
        told = {
            "num_truncated": f"cut at {max_length} tokens",
            "num_split": f"cut in pieces of {max_length} tokens",
            "num_dropped_long": f"left out: longer than {max_length} tokens",
        }
        lines = [f"{name}: {counts[key]} of {num_rows} samples {text}" for key, text in told.items() if counts.get(key)]
        if unsupervised:
            lines.append(f"{name}: {unsupervised} of {num_rows} samples dropped: nothing supervised left")
        if counts.get("num_blank_lines"):
            lines.append(f"{name}: {counts['num_blank_lines']} blank lines skipped")
        return lines + [f"{name}: {n} of {num_rows} samples: {text}" for text, n in self.info["remarks"].items()]


class Samples:
    """Samples of one or several stores. ``samples[i]`` is ``(input_ids int32 [T], weights float32 [T])``: the weight of
    each token in the loss, 0 where nothing is learned from it.

    Attributes:
        lengths: int32 [N], tokens of each sample.
        num_targets: int32 [N], its supervised tokens that have a token before them.
        target_weights: float64 [N], the sum of their weights.
        sources: int16 [N], which of ``stores`` it is from.
        fingerprint: identifies the ids, the weights and their order on any machine.
    """

    def __init__(self, stores: Sequence[Store], fingerprint: str = "", index: np.ndarray | None = None) -> None:
        self.stores = list(stores)
        self.fingerprint = fingerprint or (
            stores[0].fingerprint if len(stores) == 1 else digest(*(store.fingerprint for store in stores))
        )
        sizes = [len(store.arrays["samples"]) for store in stores]
        self._firsts = np.cumsum([0, *sizes])
        self._index = index  # [N] among the samples of all stores; None: all of them
        self.sources = self._chosen(np.repeat(np.arange(len(sizes), dtype=np.int16), sizes))
        self.lengths = self._column("length")
        self.num_targets = self._column("num_targets")
        self.target_weights = self._column("target_weight")

    def _column(self, name: str) -> np.ndarray:
        return self._chosen(np.concatenate([store.arrays["samples"][name] for store in self.stores]))

    def _chosen(self, values: np.ndarray) -> np.ndarray:
        return values if self._index is None else values[self._index]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        store, sample = self._find(i)
        start, end = sample["start"], sample["start"] + sample["length"]
        weights = np.array(store.info["weights"], np.float32)[store.arrays["weight_codes"][start:end]]
        return store.arrays["input_ids"][start:end], weights

    def _find(self, i: int) -> tuple[Store, Any]:
        number = self.sources[i]
        row = i if self._index is None else self._index[i]
        return self.stores[number], self.stores[number].arrays["samples"][row - self._firsts[number]]

    def origin(self, i: int) -> str:
        """Where sample ``i`` comes from: ``train.jsonl:17``."""
        store, sample = self._find(i)
        return store.source.origin(int(sample["part"]), int(sample["number"]))

    def select(self, index: np.ndarray, reason: str) -> "Samples":
        """The samples at ``index``; ``reason`` tells this choice from others of the same samples."""
        chosen = index if self._index is None else self._index[index]
        return Samples(self.stores, digest(self.fingerprint, reason), chosen)

    def hashes(self, name: str) -> np.ndarray:
        """uint64 [N]: ``ids_hash`` or ``text_hash`` of each sample."""
        return self._column(name)

    @property
    def max_id(self) -> int:
        return max(int(store.info["max_id"]) for store in self.stores)

    @property
    def names(self) -> list[str]:
        return [store.name for store in self.stores]

    def rows(self) -> np.ndarray:
        """int64 [N], the number of the row each sample is from. Several that one row became lie together."""
        keys = np.stack([self.sources, self._column("part"), self._column("number")])
        is_next = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return np.concatenate([[0], np.cumsum(is_next)])

    @property
    def report(self) -> dict[str, int]:
        return {
            "num_samples": len(self),
            "num_tokens": int(self.lengths.sum(dtype=np.int64)),
            "num_supervised_tokens": int(self.num_targets.sum(dtype=np.int64)),
        }


def duplicates(evaluation: Samples, train: Samples) -> tuple[int, int]:
    """How many evaluation samples also stand in the training data: token for token, and in other case, spacing or
    punctuation."""
    exact = np.isin(evaluation.hashes("ids_hash"), train.hashes("ids_hash"))
    empty = xxhash.xxh3_64_intdigest(b"")  # of samples that came as tokens, or hold no letter
    text = evaluation.hashes("text_hash")
    similar = np.isin(text, train.hashes("text_hash")) & (text != np.uint64(empty)) & ~exact
    return int(exact.sum()), int(similar.sum())
