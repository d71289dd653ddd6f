"""The ranks of a machine ask the hub about the model once.

Promises: the first rank to come asks the hub and fills its cache; the others wait for it, take all from the cache, and
make no request. If the hub refuses the first rank something, all ranks raise the same problems. If the rank that asks
ends, the next one asks. A rank waits at most ``ddp_timeout`` for one that hangs, and not for one that never starts.

Data sets are not covered: offline, ``datasets`` opens the newest copy in its cache, which may be of another commit.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock
from huggingface_hub import constants

from kit import durable
from kit.cache import cache_folder, delete_old, digest, make_folder
from kit.config.recipe import Recipe
from kit.durable import read_small
from kit.errors import Problem, UserError, raise_if
from kit.strategy.launcher import launched_rank
from kit.strategy.network import machine_id

_asked_at: dict[Path, float] = {}  # when this process last knew the answers in a file, in seconds since the epoch


@contextmanager
def asked_once(what: str, recipe: Recipe, is_remote: bool = False) -> Iterator[bool]:
    """Run the ``with`` block, which asks the hub for a recipe, on one rank of this machine before the others.

    Nothing is changed for a single process, for a model and an adapter in folders, or offline (``HF_HUB_OFFLINE``).

    Args:
        what: names the block; each block of a command has its own name.
        is_remote: the block asks the hub whatever the model is.

    Yields whether this rank is the one that asks; without others it is.

    Raises:
        UserError: the hub refused the first rank something.
    """
    rank = launched_rank()
    names = [name for name in (recipe.model_name_or_path, recipe.adapter_name_or_path) if name]
    is_local = not is_remote and all(os.path.exists(os.path.expanduser(name)) for name in names)
    is_alone = rank is None or rank.local_world == 1
    lock = None
    if not (is_alone or is_local or constants.HF_HUB_OFFLINE):
        lock = _acquired(what, recipe)
    if lock is None:
        yield True
        return
    answers = Path(lock.lock_file).with_suffix(".json")
    try:
        problems = _read(answers)
        if problems is None:
            try:
                yield True
            except UserError as error:
                _write(answers, error.problems)
                raise
            _write(answers, [])
            return
    finally:
        _asked_at[answers] = time.time()
        lock.release()
    raise_if(problems)
    with _offline():
        yield False


def _acquired(what: str, recipe: Recipe) -> FileLock | None:
    """The lock of a recipe on this machine, held; None if there is none in ``ddp_timeout``, or no place for locks."""
    folder = cache_folder() / "asked"
    same = (machine_id(), constants.HF_HUB_CACHE, what, recipe.model_dump_json())
    lock = FileLock(folder / f"{digest(*same)}.lock")
    try:
        make_folder(folder.name)
        lock.acquire(timeout=recipe.ddp_timeout)
    except (OSError, NotImplementedError):
        return None
    return lock


def _read(answers: Path) -> list[Problem] | None:
    """The problems of the rank that asked; None if none has asked since this process began, or asked before."""
    try:
        entry = json.loads(read_small(answers))
        since = _asked_at.get(answers) or psutil.Process().create_time()
        return [Problem(**each) for each in entry["problems"]] if entry["at"] > since else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(answers: Path, problems: Sequence[Problem]) -> None:
    entry = {"at": time.time(), "problems": [asdict(problem) for problem in problems]}
    with suppress(OSError):  # then the next rank asks
        durable.write_text(answers, json.dumps(entry))
        delete_old(answers.parent)  # if one of the files is a lock in use, one more rank asks


@contextmanager
def _offline() -> Iterator[None]:
    """In the ``with`` block, libraries take from the cache what lies there, and make no request."""

    def set_offline(value: bool) -> None:
        constants.HF_HUB_OFFLINE = value
        copy: Any = sys.modules.get("datasets.config")  # it copies the setting when it is imported
        if copy:
            copy.HF_HUB_OFFLINE = value

    set_offline(True)
    try:
        yield
    finally:
        set_offline(False)
