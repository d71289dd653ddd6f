"""Tokenises a source once, in several processes, and caches the samples. A run maps them into memory from the cache.

Promises:

- The key of a cache entry covers everything that its ids depend on, including the version of the code.
- Any number of processes may ask for the same samples at once, before a process group exists: one of them tokenises,
  with helper processes on every core, and the others wait for it.
- Memory use does not grow with the size of the source: rows are read in blocks, and their samples written to disk.
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

import numpy as np
from tqdm import tqdm

from kit.cache import Writer, cache_folder, cannot_write, digest, locked, open_entry
from kit.data.read.parts import Block
from kit.data.read.sources import MEND, Source, shown
from kit.data.samples.bad_rows import SKIPPED_FILE, BadRows
from kit.data.samples.rows import Encoder, Opened, Piece
from kit.data.samples.samples import Samples, Store
from kit.errors import Problem, UserError, raise_if

PR_SET_PDEATHSIG = 1  # the number of this option of Linux's prctl
MAX_WEIGHTS = 256  # different token weights in one data set: a token's weight is stored as one byte, a code
MAX_PROBLEMS = 1000  # after so many bad rows tokenising stops


def tokenise(opened: Opened, encoder: Encoder, num_processes: int | None = None, skips: bool = False) -> Samples:
    """Return the samples of a source from the cache; if they are not there, make them first.

    Args:
        num_processes: the number of processes that tokenise; None: one per core.
        skips: leave out rows that cannot be used.

    Raises ``UserError`` with the rows that cannot be used, or if too many of them would be skipped; or if no sample is
    left, the source changes meanwhile, or the cache cannot be written.
    """
    key = digest(opened.source.digest, opened.key, *encoder.key())
    # What is ignored and not read changes no sample, but which rows are refused: another entry, the same fingerprint.
    entry = digest(key, sorted(opened.ignored)) if opened.ignored else key
    folder = cache_folder() / "samples" / entry
    stored = open_entry(folder)
    if stored is None:
        with locked(folder):
            stored = open_entry(folder)  # another process may have made it meanwhile
            if stored is None:
                _make(folder, opened, encoder, num_processes, skips)
                stored = open_entry(folder)
    assert stored is not None
    arrays, info = stored
    if info["skipped"] and not skips:
        raise_if(shown(BadRows.from_record(info["skipped"]).problems(), opened.source.name))
    fingerprint = digest(key, [row[:2] for row in info["skipped"]]) if info["skipped"] else key
    return Samples([Store(opened.source, opened.entry.name, arrays, info, fingerprint, folder)])


def _make(folder: Path, opened: Opened, encoder: Encoder, num_processes: int | None, skips: bool) -> None:
    """Tokenise a source into the cache entry ``folder``. If that fails, no entry is left."""
    source = opened.source
    with cannot_write(folder.parent):
        writer = Writer(folder)
    try:
        whole = _Whole(writer, skips)
        hidden = not sys.stderr.isatty()
        bar = tqdm(total=source.total, desc="tokenising", unit=source.unit, unit_scale=True, disable=hidden)
        with bar:
            for size, piece in _encoded(opened, encoder, num_processes):
                bar.update(size)
                with cannot_write(folder.parent):
                    whole.add(piece)
                if len(whole.problems) + (not skips) * whole.bad.num_single > MAX_PROBLEMS:
                    break
        info = whole.finished(source.name, encoder.max_length)
        if changed := source.changed():  # then the entry would not fit its key
            fix = "start again when nothing writes to it any more"
            raise UserError(Problem(str(changed[0]), "changed while it was read", fix=fix))
        with cannot_write(folder.parent):
            writer.finish(info)
            if whole.bad.num_rows:
                whole.bad.write(folder / SKIPPED_FILE)
    except BaseException:
        writer.discard()
        raise


def _blocks(source: Source, columns: list[str]) -> Iterator[tuple[int, Block]]:
    """The blocks of a source, each with the number of its part."""
    for number, part in enumerate(source.parts):
        for block in part.blocks(columns):
            yield number, block


def _encoded(opened: Opened, encoder: Encoder, num_processes: int | None) -> Iterator[tuple[int, Piece]]:
    """Encode the blocks of a source: the size of each block, for the progress bar, and its piece, in order."""
    blocks = _blocks(opened.source, opened.columns)
    first = list(islice(blocks, 2))
    blocks = chain(first, blocks)
    if num_processes is None:
        num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_daemon = multiprocessing.current_process().daemon  # a daemon may not have children
    if num_processes == 1 or len(first) < 2 or not sys.platform.startswith("linux") or is_daemon:
        for part, block in blocks:
            yield block.size, encoder.encode_block(opened, part, block)
        return
    # Forked helpers have everything imported already. Forking is safe: there is no GPU context or process group yet.
    pool = ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("fork"), _become_helper, (encoder, opened, os.getpid())
    )
    with pool:
        waiting: deque[tuple[int, Future[Piece]]] = deque()

        def next_piece() -> tuple[int, Piece]:
            size, future = waiting.popleft()
            return size, future.result()

        try:
            for part, block in blocks:
                waiting.append((block.size, pool.submit(_help, part, block)))
                if len(waiting) > 2 * num_processes:  # read ahead, but not the whole source into memory
                    yield next_piece()
            while waiting:
                yield next_piece()
        except BrokenProcessPool:
            fix = "it may have been killed for its memory: try --dataset_num_proc 1"
            raise UserError(Problem("dataset_num_proc", "a process that tokenises died", fix=fix)) from None
        finally:
            pool.shutdown(cancel_futures=True)


_ENCODE: Callable[[int, Block], Piece]  # set in helpers only


def _become_helper(encoder: Encoder, opened: Opened, parent: int) -> None:
    """Prepare a process of the pool. ``parent`` is the id of the process that started it."""
    # A helper must die with its parent, even if that is killed: it would wait for ever, and keep the parent's locks.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl was called
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use every core
    global _ENCODE
    _ENCODE = partial(encoder.encode_block, opened)


def _help(part: int, block: Block) -> Piece:
    return _ENCODE(part, block)


class _Whole:
    """Joins the pieces of a source into one cache entry. Once it cannot be made, no more samples are written."""

    def __init__(self, writer: Writer, skips: bool) -> None:
        self._writer, self._skips = writer, skips
        self.num_tokens = self.max_id = 0
        self.weights = [0.0, 1.0]
        self.problems: list[Problem] = []
        self.bad = BadRows(keeps_all=skips)
        self.counts: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()

    def add(self, piece: Piece) -> None:
        """Append the samples of a piece to the entry, and its counts and messages to those of the source."""
        self.counts += piece.counts
        self.remarks += piece.remarks
        self.unused += piece.unused
        self.problems += piece.problems
        self.bad.add(piece.bad)
        if self.problems or (self.bad.num_rows and not self._skips) or not len(piece.samples):
            return
        self.weights += [weight for weight in piece.weights if weight not in self.weights]
        if len(self.weights) > MAX_WEIGHTS:
            found = f"more than {MAX_WEIGHTS} different weights in a data set"
            self.problems.append(Problem("weight", found, fix="round them; a stream may have any number"))
            return
        codes = np.array([self.weights.index(weight) for weight in piece.weights], np.uint8)
        piece.samples["start"] += self.num_tokens
        self.num_tokens += len(piece.input_ids)
        self.max_id = max(self.max_id, int(piece.input_ids.max()))
        self._writer.append(
            {"samples": piece.samples, "input_ids": piece.input_ids, "weight_codes": codes[piece.weight_codes]}
        )

    def finished(self, name: str, max_length: int) -> dict[str, Any]:
        """What the entry holds besides the arrays.

        Raises ``UserError`` with the problems of the rows, or if no sample is left. ``name`` is the source's.
        """
        raise_if(shown(self.problems + ([] if self._skips else self.bad.problems()), name))
        self.bad.raise_if_too_many(name, self.counts["num_rows"])
        if not self.num_tokens:
            found = f"none of {self.counts['num_rows']} samples has a supervised token within max_length"
            fix = f"raise max_length, which is {max_length}"
            if self.bad.num_rows and not self.counts["num_rows"]:
                raise UserError(*shown(self.bad.problems(), name, MEND))
            if not self.counts["num_truncated"] and not self.counts["num_dropped_long"]:
                found, fix = f"nothing in {self.counts['num_rows']} samples is supervised", "see `kit inspect`"
            raise UserError(Problem(name, found if self.counts["num_rows"] else "no rows", "at least one", fix))
        return {
            "counts": dict(self.counts),
            "remarks": dict(self.remarks),
            "unused": dict(self.unused),
            "skipped": self.bad.record(),
            "weights": self.weights,
            "max_id": self.max_id,
        }
