"""Datasets of the hub.

Promises: if the library or the hub refuses a dataset, the message lists its splits or configs; an unreachable hub is
reported after one short request, not after long retries.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.data.read.blocks import Part
from kit.data.read.compressed import type_and_message
from kit.data.read.tables import Shard
from kit.hub.hub_errors import check_access, not_cached, refusal
from kit.system.errors import Problem, UserError

COMMIT = re.compile("[0-9a-f]{40}")
HUB_SECONDS = 5.0  # timeout of the first request to the hub


@dataclass(frozen=True)
class Found:
    """What the name of a dataset stands for."""

    name: str  # to show
    parts: Sequence[Part]
    files: Sequence[Path]  # the files whose content goes into the digest of the source
    marks: Sequence[Any]  # what else goes into the digest; JSON values
    commit: str | None = None  # of a dataset of the hub


def _loaded(name: str, dataset: Any) -> Found:
    """A dataset that the library has put on disk."""
    # The library's own fingerprint depends on paths and times, so it differs between machines: used only without files.
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    marks = [str(dataset.split), len(dataset), *([] if files else [dataset._fingerprint])]
    folder = files[0].parent.name if files else ""  # the library names it after the commit
    return Found(name, [Shard(name, dataset)], files, marks, folder if COMMIT.fullmatch(folder) else None)


def ask_hub(name: str, flag: str, revision: str | None = None) -> str | None:
    """Ask the hub, in one short request, for the commit of a dataset at ``revision``, or for the newest one.

    Raises ``UserError`` if it refuses.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS)
        check_access(name, "dataset", info)
    except Exception as error:  # connection errors differ with the client library in use
        raise UserError(refusal(error, f"no file or folder {name!r}", name, "dataset", flag)) from None
    return info.sha


def open_hub(
    name: str, split: str, flag: str, config: str | None, streaming: bool, revision: str | None = None
) -> Found:
    """Open a dataset of the hub: download it or, with ``streaming``, read its shards over the network later.

    ``name`` is the hub id, ``flag`` the recipe's key for it, for messages. Raises ``UserError`` if the hub cannot be
    reached, refuses the dataset, or has no such config, split or revision.
    """
    import datasets
    from huggingface_hub import constants

    tried = f"no file or folder {name!r}"
    # One short request first: load_dataset retries for half a minute when the hub cannot be reached.
    newest = revision in (None, "main")
    commit = revision if constants.HF_HUB_OFFLINE else ask_hub(name, flag, revision)
    # The newest is not named: then the library takes types of columns from the hub, if the hub has some.
    named = {} if newest else {"revision": commit or revision}
    try:
        dataset = datasets.load_dataset(name, config, split=split, streaming=streaming, **named)
    except Exception as error:  # builders of datasets raise many types
        if problem := _choice(str(error), name, flag):
            raise UserError(problem) from None
        if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError | FileNotFoundError):
            raise UserError(not_cached(tried, name, "dataset", flag)) from None
        found = f"{tried}, and split {split!r} of hub id {name!r} cannot be loaded: {type_and_message(error)}"
        raise UserError(flag, found) from None
    shown = f"{name}[{split}]" if config is None else f"{name}[{config}, {split}]"
    loaded = None if streaming else _loaded(shown, dataset)
    found_commit = loaded.commit if loaded else None if constants.HF_HUB_OFFLINE else commit
    # Offline, and where the hub refuses a file, the library opens the newest copy in its cache.
    if not newest and found_commit != commit:
        what = f"the copy of {name} in the cache is of commit {found_commit or 'unknown'}"
        fix = "download it once without HF_HUB_OFFLINE, or name the commit of that copy"
        raise UserError(f"{flag}_revision", what, f"that of {revision!r}", fix)
    if loaded:
        return loaded
    num_shards = dataset.num_shards
    parts = [Shard(f"{shown} shard {i}", dataset.shard(num_shards, i)) for i in range(num_shards)]
    return Found(shown, parts, [], [found_commit or name, config, split], found_commit)


def _choice(message: str, name: str, flag: str) -> Problem | None:
    """The ``Problem`` for a message of ``datasets`` that lists the configs or splits; None for any other message."""
    found = f"{name}: {' '.join(message.splitlines()[:2])}"
    if message.startswith(("Config name is missing", "BuilderConfig")):
        return Problem(f"{flag}_config", found, f"one of them as --{flag}_config")
    if message.startswith(("Unknown split", "Bad split")):  # of a stream a slice is bad too
        return Problem(f"{flag}_split", found, f"one of them as --{flag}_split")
    return None
