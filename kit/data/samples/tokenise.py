"""Tokenises a dataset once, in several processes, and caches the samples. A run maps them into memory from the cache.

Promises:

- The key of a cache entry covers everything that its ids depend on, including the version of the code.
- Any number of processes may ask for the same samples at once, before a process group exists: one of them tokenises,
  with worker processes on every core, and the others wait for it.
- Memory use does not grow with the size of the dataset: rows are read in blocks, and their samples written to disk.
- Every row is accounted for: kept, cut, left out or wrong. Each case is counted, and wrong rows are named.
- A cache entry that lacks wrong rows, because a run skipped them, lists them, and serves only runs that skip them.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from kit.data.media import KINDS
from kit.data.read.blocks import Block
from kit.data.read.media_files import stamp_of
from kit.data.read.sources import read_blocks
from kit.data.samples.bad_rows import Tally
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.data.samples.samples import Store
from kit.system.cache import Writer, cache_folder, cannot_write, digest, locked, open_entry
from kit.system.console import bar
from kit.system.errors import UserError

PR_SET_PDEATHSIG = 1  # the number of this option of Linux's prctl
MAX_PROBLEMS = 1000  # after this number of problems tokenising stops


def tokenise(dataset: Dataset, encoder: Encoder, num_processes: int | None = None, skips: bool = False) -> Store:
    """Return the samples of a dataset from the cache; if they are not there, make them first.

    Args:
        num_processes: the number of processes that tokenise; None: one per core.
        skips: leave out rows that cannot be used.

    Raises:
        UserError: with the rows that cannot be used, or if too many of them would be skipped; or if no sample is left,
            the source changes meanwhile, or the cache cannot be written.
    """
    full_key = digest(dataset.source.digest, dataset.key, *encoder.key())
    # If no row has any, it does not matter how they would be read.
    key = digest(dataset.source.digest, dataset.key, *replace(encoder, media=None).key())
    # Neither changes a sample, but which rows are left out: another cache entry, and the same fingerprint if none is.
    folder = cache_folder() / "samples" / digest(full_key, sorted(dataset.ignored), skips)
    media_folder = encoder.settings.media_folder
    cached = _open(folder, dataset, media_folder)
    if cached is None:
        with locked(folder):
            cached = _open(folder, dataset, media_folder)  # another process may have made it meanwhile
            if cached is None:
                _make(folder, dataset, encoder, num_processes, skips)
                cached = open_entry(folder)
    assert cached is not None
    arrays, info = cached
    has_media = len(arrays.get("media", ())) > 0
    if has_media:
        key = digest(full_key, arrays["media"]["digest"].tolist())
    fingerprint = digest(key, info["skipped_at"]) if info["skipped_at"] else key
    kinds = {KINDS[each] for each in np.unique(arrays["media"]["kind"])} if has_media else set()
    media = encoder.media.only(kinds) if encoder.media and has_media else None
    about = dataset.source, dataset.entry.name, encoder.kind, arrays, info
    return Store(*about, fingerprint, partial(encoder.prompt, dataset), media, media_folder)


def _open(folder: Path, dataset: Dataset, media_folder: str | None) -> tuple[dict[str, np.ndarray], Any] | None:
    """The cache entry; None if there is none, or if a file of its media has changed since."""
    entry = open_entry(folder)
    return None if entry is None or _is_outdated(entry[0], dataset, media_folder) else entry


def _is_outdated(arrays: Mapping[str, np.ndarray], dataset: Dataset, media_folder: str | None) -> bool:
    """Whether a file of media in a cache entry has changed since."""
    if not len(arrays.get("media", ())):
        return False
    parts = np.repeat(arrays["samples"]["part"], arrays["media_counts"])
    stamps: dict[Path, int] = {}
    for each, part in zip(arrays["media"], parts.tolist(), strict=True):
        if each["is_path"]:
            data = arrays["media_data"][each["start"] : each["start"] + each["num_bytes"]]
            base = os.path.expanduser(media_folder or dataset.source.parts[part].folder)
            file = Path(base, data.tobytes().decode())
            if file not in stamps:
                stamps[file] = stamp_of(file)
            if stamps[file] != each["stamp"]:
                return True
    return False


def _make(folder: Path, dataset: Dataset, encoder: Encoder, num_processes: int | None, skips: bool) -> None:
    """Tokenise a dataset into the cache entry ``folder``. If that fails, no entry is left."""
    source = dataset.source
    with cannot_write(folder.parent):
        writer = Writer(folder)
    tally, num_tokens, num_bytes = Tally(), 0, 0
    try:
        with bar("tokenising", " rows", None, scales=True) as progress:
            for num_rows, piece in _encoded(dataset, encoder, num_processes):
                progress.update(num_rows)
                tally.add(piece)
                num_problems = len(tally.problems) + (0 if skips else len(tally.bad))  # then there will be no entry
                if num_problems > MAX_PROBLEMS:
                    break
                if num_problems or not len(piece):
                    continue
                arrays = piece.arrays
                arrays["samples"]["start"] += num_tokens
                num_tokens += len(arrays["input_ids"])
                if "media" in arrays:
                    arrays["media"]["start"] += num_bytes
                    num_bytes += len(arrays["media_data"])
                with cannot_write(folder.parent):
                    writer.append(arrays)
        tally.check(source.name, skips, num_tokens)
        if changed := source.changed():  # then the entry would not fit its key
            fix = "start again when nothing writes to it any more"
            raise UserError(str(changed[0]), "changed while it was read", fix=fix)
        about = {"dataset": source.name, **encoder.about()}
        places = [[row.part, row.number] for row in tally.bad]
        with cannot_write(folder.parent):
            writer.finish({**tally.record(), "skipped_at": places, "about": about})
    except BaseException:
        writer.discard()
        raise


def _encoded(dataset: Dataset, encoder: Encoder, num_processes: int | None) -> Iterator[tuple[int, Piece]]:
    """Encode the blocks of a dataset. Yields the number of rows of each, and its piece, in order."""
    blocks = read_blocks(dataset.source.parts, dataset.columns)
    first_two = list(islice(blocks, 2))
    blocks = chain(first_two, blocks)
    # A daemon may not have children.
    if sys.platform.startswith("linux") and not multiprocessing.current_process().daemon and len(first_two) > 1:
        num_processes = num_processes or len(os.sched_getaffinity(0))
        if num_processes > 1:
            yield from _encoded_by_workers(blocks, dataset, encoder, num_processes)
            return
    for part, block in blocks:
        yield block.num_rows, encoder.encode_block(dataset, part, block)


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
            raise UserError("dataset_num_proc", "a process that tokenises died", fix=fix) from None
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
    if encoder.media:
        import torch

        torch.set_num_threads(1)  # those of the process before are not there
    global _ENCODE
    _ENCODE = partial(encoder.encode_block, dataset)


def _encode_in_worker(part: int, block: Block) -> Piece:
    return _ENCODE(part, block)
