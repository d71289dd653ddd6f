"""Tokenises a data set once, in several processes, and caches the samples. A run maps them into memory from the cache.

Promises:

- The key of a cache entry covers everything that its ids depend on, including the version of the code.
- Any number of processes may ask for the same samples at once, before a process group exists: one of them tokenises,
  with worker processes on every core, and the others wait for it.
- Memory use does not grow with the size of the data set: rows are read in blocks, and their samples written to disk.
- Every row is accounted for: kept, cut, left out or wrong. Each case is counted, and wrong rows are named.
- A cache entry may lack wrong rows, because a run skipped them. It lists them, so a run that must not skip any says so.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kit.cache import Writer, cache_folder, cannot_write, digest, locked, open_entry
from kit.console import bar
from kit.data.read.parts import Block
from kit.data.read.sources import read_blocks, shown
from kit.data.samples.bad_rows import BadRows
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.data.samples.samples import Store
from kit.errors import Problem, UserError, raise_if

PR_SET_PDEATHSIG = 1  # the number of this option of Linux's prctl
MAX_PROBLEMS = 1000  # after this number of problems tokenising stops


def tokenise(dataset: Dataset, encoder: Encoder, num_processes: int | None = None, skips: bool = False) -> Store:
    """Return the samples of a data set from the cache; if they are not there, make them first.

    Args:
        num_processes: the number of processes that tokenise; None: one per core.
        skips: leave out rows that cannot be used.

    Raises:
        UserError: with the rows that cannot be used, or if too many of them would be skipped; or if no sample is left,
            the source changes meanwhile, or the cache cannot be written.
    """
    key = digest(dataset.source.digest, dataset.key, *encoder.key())
    # Ignored columns change no sample, but which rows are refused: another cache entry, the same fingerprint.
    entry_key = digest(key, sorted(dataset.ignored)) if dataset.ignored else key
    folder = cache_folder() / "samples" / entry_key
    cached = open_entry(folder)
    if cached is None:
        with locked(folder):
            cached = open_entry(folder)  # another process may have made it meanwhile
            if cached is None:
                _make(folder, dataset, encoder, num_processes, skips)
                cached = open_entry(folder)
    assert cached is not None
    arrays, info = cached
    if info["skipped"] and not skips:
        raise_if(BadRows.from_record(info["skipped"]).shown(dataset.source.name, info["counts"]["num_rows"]))
    fingerprint = digest(key, [row[:2] for row in info["skipped"]]) if info["skipped"] else key
    return Store(dataset.source, dataset.entry.name, arrays, info, fingerprint)


def _make(folder: Path, dataset: Dataset, encoder: Encoder, num_processes: int | None, skips: bool) -> None:
    """Tokenise a data set into the cache entry ``folder``. If that fails, no entry is left."""
    source = dataset.source
    with cannot_write(folder.parent):
        writer = Writer(folder)
    try:
        entry = _Entry(writer, skips)
        progress = bar("tokenising", " rows", None, scales=True)
        with progress:
            for num_rows, piece in _encoded(dataset, encoder, num_processes):
                progress.update(num_rows)
                with cannot_write(folder.parent):
                    entry.add(piece)
                if entry.num_problems > MAX_PROBLEMS:
                    break
        info = {
            **entry.finished(source.name),
            "about": {"dataset": source.name, **encoder.about()},
        }
        changed = source.changed()
        if changed:  # then the entry would not fit its key
            fix = "start again when nothing writes to it any more"
            raise UserError(Problem(str(changed[0]), "changed while it was read", fix=fix))
        with cannot_write(folder.parent):
            writer.finish(info)
    except BaseException:
        writer.discard()
        raise


def _encoded(dataset: Dataset, encoder: Encoder, num_processes: int | None) -> Iterator[tuple[int, Piece]]:
    """Encode the blocks of a data set. Yields the number of rows of each, and its piece, in order."""
    blocks = read_blocks(dataset.source.parts, dataset.columns)
    first_two = list(islice(blocks, 2))
    blocks = chain(first_two, blocks)
    if num_processes is None:
        num_processes = _num_cores()
    # A daemon may not have children.
    can_fork = sys.platform.startswith("linux") and not multiprocessing.current_process().daemon
    if num_processes > 1 and len(first_two) > 1 and can_fork:
        yield from _encoded_by_workers(blocks, dataset, encoder, num_processes)
        return
    for part, block in blocks:
        yield block.num_rows, encoder.encode_block(dataset, part, block)


def _num_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _encoded_by_workers(
    blocks: Iterator[tuple[int, Block]], dataset: Dataset, encoder: Encoder, num_workers: int
) -> Iterator[tuple[int, Piece]]:
    """Encode ``blocks`` in worker processes. Yields what ``_encoded`` does."""
    # Forked workers have everything imported already. Forking is safe: no process group exists yet, and no worker uses
    # a GPU.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, fork, _start_worker, (encoder, dataset, os.getpid())) as pool:
        waiting: deque[tuple[int, Future[Piece]]] = deque()

        def next_piece() -> tuple[int, Piece]:
            num_rows, future = waiting.popleft()
            return num_rows, future.result()

        try:
            for part, block in blocks:
                waiting.append((block.num_rows, pool.submit(_encode_in_worker, part, block)))
                if len(waiting) > 2 * num_workers:  # read ahead, but not the whole source into memory
                    yield next_piece()
            while waiting:
                yield next_piece()
        except BrokenProcessPool:
            fix = "it may have been killed for its memory: try --dataset_num_proc 1"
            raise UserError(Problem("dataset_num_proc", "a process that tokenises died", fix=fix)) from None
        finally:
            pool.shutdown(cancel_futures=True)


_ENCODE: Callable[[int, Block], Piece]  # set in workers only


def _start_worker(encoder: Encoder, dataset: Dataset, parent: int) -> None:
    """Prepare a process of the pool. ``parent`` is the id of the process that started it."""
    # A worker must die with its parent, even if that is killed: it would wait for ever, and keep the parent's locks.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl was called
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use every core
    global _ENCODE
    _ENCODE = partial(encoder.encode_block, dataset)


def _encode_in_worker(part: int, block: Block) -> Piece:
    return _ENCODE(part, block)


class _Entry:
    """Joins the pieces of a data set into one cache entry. Once it cannot be made, no more samples are written."""

    def __init__(self, writer: Writer, skips: bool) -> None:
        self._writer = writer
        self._skips = skips
        self.num_tokens = 0
        self.problems: list[Problem] = []
        self.bad = BadRows(keeps_all=skips)
        self.counts: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()

    @property
    def num_problems(self) -> int:
        """The number of problems because of which there will be no entry."""
        return len(self.problems) + (0 if self._skips else self.bad.num_rows)

    def add(self, piece: Piece) -> None:
        """Append the samples of a piece to the entry, and its counts and messages to those of the data set."""
        self.counts += piece.counts
        self.remarks += piece.remarks
        self.unused += piece.unused
        self.problems += piece.problems
        self.bad.add(piece.bad)
        if self.problems or (self.bad.num_rows and not self._skips) or not len(piece.samples):
            return
        piece.samples["start"] += self.num_tokens
        self.num_tokens += len(piece.input_ids)
        arrays = {"samples": piece.samples, "input_ids": piece.input_ids, "weights": piece.weights}
        if piece.preferences is not None:
            arrays["preferences"] = piece.preferences
        self._writer.append(arrays)

    def finished(self, name: str) -> dict[str, Any]:
        """Return what the entry of the source ``name`` holds besides the arrays.

        Raises:
            UserError: with the problems of the rows, or if no sample is left.
        """
        num_rows = self.counts["num_rows"]
        raise_if(shown(self.problems, name, "") if self._skips else self.bad.shown(name, num_rows, self.problems))
        self.bad.raise_if_too_many(name, num_rows)
        if not self.num_tokens:
            if self.counts["num_truncated"] or self.counts["num_dropped_long"]:
                found = f"none of {num_rows} samples has something to learn within max_length"
                fix = "raise --max_length"
            else:
                found = f"nothing in {num_rows} samples is supervised" if num_rows else "no rows"
                fix = "`kit inspect` shows what of them would be learned" if num_rows else ""
            raise UserError(Problem(name, found, "at least one", fix), *self.bad.problems())
        return {
            "counts": dict(self.counts),
            "remarks": dict(self.remarks),
            "unused": dict(self.unused),
            "skipped": self.bad.record(),
        }
