"""Tokenised samples: made once from a source, cached, memory-mapped, read-only.

Promises:

- A cache entry's key holds everything that its ids depend on, code included; an entry is complete or absent, and a
  damaged one is made again.
- Any number of processes may ask for the same samples at once, before any process group exists: one tokenises, the
  others wait for it.
- A sample longer than ``max_length`` is cut at its end; one without anything supervised is dropped; both are counted.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock
from tqdm import tqdm

from kit.chat import Encoded, encode_all
from kit.errors import Problem, UserError, raise_if
from kit.sources import Source, read_samples, shown

# Part of every cache key: raise it whenever the same rows would give other ids or masks, or the files change.
CODE_VERSION = 1
ROWS_AT_A_TIME = 1000  # the tokenizer works on many texts in parallel
ARRAYS = ("input_ids", "mask", "starts", "numbers")


class Samples:
    """Samples as flat arrays. ``samples[i]`` is ``(input_ids int32 [T], mask uint8 [T])``, mask 1 = supervised.

    Attributes:
        lengths: int32 [N], tokens of each sample.
        num_supervised: int32 [N], targets of each sample: supervised tokens that have a token before them.
        fingerprint: identifies the ids, the masks and their order on any machine.
        counts: what happened to the rows of the source, held-out ones included.
    """

    def __init__(
        self,
        source: Source,
        arrays: Mapping[str, np.ndarray],
        counts: Mapping[str, Any],
        fingerprint: str,
        index: np.ndarray | None = None,
    ) -> None:
        self._source, self._arrays, self.counts, self.fingerprint = source, arrays, counts, fingerprint
        starts, mask = arrays["starts"], arrays["mask"]
        self._index = np.arange(len(starts) - 1) if index is None else index  # [N] which of the stored samples
        num_supervised = np.add.reduceat(mask, starts[:-1], dtype=np.int64) - mask[starts[:-1]]
        self.lengths = np.diff(starts)[self._index].astype(np.int32)
        self.num_supervised = num_supervised[self._index].astype(np.int32)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self._arrays["starts"][self._index[i] :][:2]
        return self._arrays["input_ids"][start:end], self._arrays["mask"][start:end]

    def place(self, i: int) -> str:
        """Where sample ``i`` comes from: ``train.jsonl:17``."""
        return self._source.place(int(self._arrays["numbers"][self._index[i]]))

    def select(self, index: np.ndarray, reason: str) -> "Samples":
        """The samples at ``index``; ``reason`` tells this choice from others of the same samples."""
        fingerprint = _digest(self.fingerprint, reason)
        return Samples(self._source, self._arrays, self.counts, fingerprint, self._index[index])

    @property
    def max_id(self) -> int:
        return int(self._arrays["input_ids"].max())

    @property
    def report(self) -> dict[str, int]:
        counts = ("num_truncated", "num_dropped_unsupervised", "num_blank_lines")
        return {
            "num_samples": len(self),
            "num_tokens": int(self.lengths.sum()),
            "num_supervised_tokens": int(self.num_supervised.sum()),
            **{name: self.counts[name] for name in counts},
        }

    def notes(self, max_length: int) -> list[str]:
        """What a user should know about the rows of the source, a line each."""
        name, counts = self._source.name, self.counts
        num_rows, num_cut, num_dropped = (
            counts[key] for key in ("num_rows", "num_truncated", "num_dropped_unsupervised")
        )
        lines = []
        if num_cut or num_dropped:
            dropped = f", {num_dropped} dropped: nothing supervised left" if num_dropped else ""
            lines.append(f"{name}: {num_cut} of {num_rows} samples cut at {max_length} tokens{dropped}")
        if counts["num_blank_lines"]:
            lines.append(f"{name}: {counts['num_blank_lines']} blank lines skipped")
        return lines + [f"{name}: {n} of {num_rows} samples: {text}" for text, n in counts["remarks"].items()]


def tokenise(
    source: Source,
    fields: Mapping[str, str],
    tokenizer: Any,
    template: str | None,
    prompts_as_chat: bool,
    max_length: int,
    show_progress: bool,
) -> Samples:
    """The samples of ``source``, from the cache or into it. ``fields``: our field to their column.

    Raises ``UserError`` with every bad row, or if nothing is left, or if the source cannot be read or the cache not
    be written.
    """
    settings = (CODE_VERSION, source.digest, sorted(fields.items()), template, prompts_as_chat, max_length)
    key = _digest(*settings, _tokenizer_digest(tokenizer))
    folder = cache_folder() / "samples" / key
    stored = _load(folder)
    if stored is None:
        with ExitStack() as lock:
            with _cache_errors(folder.parent):
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(FileLock(f"{folder}.lock"))
            stored = _load(folder)  # another process may have made it meanwhile
            if stored is None:
                rows = _Rows(max_length)
                rows.read(source, fields, tokenizer, template, prompts_as_chat, show_progress)
                arrays, counts = rows.finished(source.name)
                with _cache_errors(folder.parent):
                    _store(folder, arrays, counts)
                stored = _load(folder)
    assert stored is not None
    return Samples(source, *stored, fingerprint=key)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror or error})"
        raise UserError(Problem("cache", found, fix="set KIT_CACHE to a folder with room")) from None


def cache_folder() -> Path:
    """``$KIT_CACHE``, or ``kit`` in the user's cache folder."""
    if os.environ.get("KIT_CACHE"):
        return Path(os.environ["KIT_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kit"


def _digest(*values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def _tokenizer_digest(tokenizer: Any) -> str:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    del state["truncation"], state["padding"]  # left behind by earlier calls, and of no effect here
    return _digest(state, tokenizer.special_tokens_map)


@dataclass
class _Rows:
    """Rows on their way to arrays."""

    max_length: int
    input_ids: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refusals: dict[Problem, list[str]] = field(default_factory=dict)  # and the places they apply to
    counts: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)

    def read(
        self,
        source: Source,
        fields: Mapping[str, str],
        tokenizer: Any,
        template: str | None,
        prompts_as_chat: bool,
        show_progress: bool,
    ) -> None:
        waiting: dict[int, Any] = {}
        hidden = not (show_progress and sys.stderr.isatty())
        rows = tqdm(read_samples(source, fields), "tokenising", source.num_rows, unit=" rows", disable=hidden)

        def encode_waiting() -> None:
            results = encode_all(list(waiting.values()), tokenizer, template, prompts_as_chat)
            for number, result in zip(waiting, results, strict=True):
                if isinstance(result, Encoded):
                    self._keep(number, result)
                else:  # usually of the template, and the same for many rows
                    self.refusals.setdefault(result, []).append(source.place(number))
            waiting.clear()

        for number, row in rows:
            if row is None:
                self.counts["num_blank_lines"] += 1
            elif isinstance(row, list):
                self.problems += row
            else:
                waiting[number] = row
            if len(waiting) == ROWS_AT_A_TIME:
                encode_waiting()
        encode_waiting()

    def _keep(self, number: int, encoded: Encoded) -> None:
        self.counts["num_rows"] += 1
        self.counts["num_truncated"] += len(encoded.input_ids) > self.max_length
        self.remarks.update(encoded.remarks)
        mask = np.array(encoded.mask[: self.max_length], np.uint8)
        if not mask[1:].any():
            self.counts["num_dropped_unsupervised"] += 1
            return
        self.input_ids.append(np.array(encoded.input_ids[: self.max_length], np.int32))
        self.mask.append(mask)
        self.numbers.append(number)

    def finished(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and counts. Raises ``UserError`` with what was wrong with the rows."""
        for problem, places in self.refusals.items():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            self.problems.append(replace(problem, found=f"{problem.found} (at {places[0]}{more})"))
        raise_if(shown(self.problems, name))
        if not self.numbers:
            found = f"none of {self.counts['num_rows']} samples has a supervised token within max_length"
            fix = f"raise max_length, which is {self.max_length}"
            raise UserError(Problem(name, found if self.counts["num_rows"] else "no rows", "at least one", fix))
        lengths = [len(ids) for ids in self.input_ids]
        arrays = {
            "input_ids": np.concatenate(self.input_ids),
            "mask": np.concatenate(self.mask),
            "starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "numbers": np.array(self.numbers, np.int64),
        }
        names = ("num_rows", "num_truncated", "num_dropped_unsupervised", "num_blank_lines")
        return arrays, {**{name: self.counts[name] for name in names}, "remarks": dict(self.remarks)}


def _store(folder: Path, arrays: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
    """Write aside, then rename: a reader finds a complete entry or none."""
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array)
        digests = {name: _file_digest(aside / f"{name}.npy") for name in arrays}
        (aside / "entry.json").write_text(json.dumps({"digests": digests, "counts": counts}))
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _load(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Arrays (memory-mapped) and counts; None where the entry is absent or damaged."""
    try:
        entry = json.loads((folder / "entry.json").read_text())
        if any(_file_digest(folder / f"{name}.npy") != entry["digests"][name] for name in ARRAYS):
            return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        return arrays, entry["counts"]
    except (OSError, ValueError, KeyError):
        return None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        state = xxhash.xxh3_128()
        while chunk := file.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()
