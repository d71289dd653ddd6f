"""Data at an address: a file, a folder, a pattern, or a folder of ``save_to_disk``, copied to this machine once.

Promises:

- The files of an address are copied into the cache complete or not at all, by one process of a machine, and are then
  read as local files.
- Each start asks the store for the version of each file (its ETag, or what the store has like it). Where one differs,
  they are copied anew, and then their content counts, as that of any local file.
- Nothing is taken from the cache without asking the store.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from kit import durable
from kit.cache import cache_folder, cannot_write, digest, locked
from kit.console import say
from kit.errors import Problem, UserError
from kit.stores import PAUSES_SECONDS, is_final, open_filesystem, problem_of, retried

_FOLDER = "remote"  # of the cache
# What tells versions of a file apart, as stores call it: hashes and versions first, then times.
_VERSIONS = "ETag etag generation md5Hash blob_id sha256 mtime LastModified last_modified updated created".split()
_SAVED = ("dataset_dict.json", "state.json")  # files of ``save_to_disk``


@dataclass(frozen=True)
class Remote:
    """What an address stands for: its files by their path in it, each with what the store says of it."""

    address: str
    field: str  # the setting that names it
    filesystem: Any
    infos: Mapping[str, Mapping[str, Any]]  # of a folder by the path in it; else by the name to show
    is_folder: bool

    @property
    def is_saved(self) -> bool:
        """Whether it is a folder written by ``save_to_disk``."""
        return self.is_folder and any(name in self.infos for name in _SAVED)

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Return where the files are on this machine; copy them if they are not there.

        Raises:
            UserError: one cannot be copied, or changed meanwhile.
        """
        given = [self.infos[name] for name in names]
        relative = list(names)
        if not self.is_folder:
            relative = [f"{i}/{PurePosixPath(info['name']).name}" for i, info in enumerate(given)]
        folder = self._fetched(dict(zip(relative, given, strict=True)))
        return [folder / name for name in relative]

    def fetch_folder(self) -> Path:
        """Return where the folder is on this machine; copy it if it is not there. Raises as ``fetch``."""
        return self._fetched(self.infos)

    def _fetched(self, infos: Mapping[str, Mapping[str, Any]]) -> Path:
        folder = (
            cache_folder() / _FOLDER / digest(*((name, infos[name]["name"], version(infos[name])) for name in infos))
        )
        if not folder.is_dir():
            self._copy(infos, folder)
        return folder

    def _copy(self, infos: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        """Copy files into a folder, which appears when all of them are complete."""
        with locked(folder), cannot_write(folder.parent):
            if folder.is_dir():
                return  # another process of this machine copied them
            num_bytes = sum(info.get("size") or 0 for info in infos.values())
            say(f"copying {self.address} to the cache: {len(infos)} files, {num_bytes / 1e6:,.1f} MB")
            staging = durable.staging_of(folder)
            durable.make_afresh(staging)
            try:
                for name, info in infos.items():
                    if ".." in PurePosixPath(name).parts:  # a store may hold such names; as a path it leads elsewhere
                        raise UserError(Problem(self.field, f"{self.address!r} has a file called {name!r}", "no .."))
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    self._copy_file(info, staging / name)
                os.replace(staging, folder)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise

    def _copy_file(self, info: Mapping[str, Any], to: Path) -> None:
        path = str(info["name"])

        def get() -> Any:
            self.filesystem.get_file(path, str(to))
            self.filesystem.invalidate_cache()
            return self.filesystem.info(path)

        try:
            after = retried(get)
        except Exception as error:  # each library has its own
            if is_final(error) and isinstance(error, OSError) and error.errno:
                raise  # of the local disk
            raise UserError(problem_of(error, self.address, self.field)) from None
        size = info.get("size")
        if version(after) != version(info) or (size is not None and to.stat().st_size != size):
            fix = "type the same command again when nothing writes there"
            raise UserError(Problem(self.field, f"{path!r} of {self.address!r} changed while it was copied", fix=fix))


def version(info: Mapping[str, Any]) -> str:
    """Return what tells this version of a file from others: size, and hash, version or time, whichever there is."""
    key = next((key for key in _VERSIONS if info.get(key) is not None), "")  # one: stores do not always give the others
    value = info.get(key)
    value = value.timestamp() if isinstance(value, datetime) else value
    return json.dumps([info.get("size"), key.lower(), str(value).strip('"')])


def look_up(address: str, field: str) -> Remote:
    """Ask the store what an address stands for. Copies nothing.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: nothing is there, it may not be read, or the store cannot be reached.
    """
    filesystem, path = open_filesystem(address, field)
    filesystem.invalidate_cache()

    def ask() -> Remote:
        try:
            info = filesystem.info(path)
        except FileNotFoundError:
            matches = filesystem.glob(path, detail=True) if re.search(r"[*?\[]", path) else {}
            before = address.rstrip("/").removesuffix(path)  # of the address of a file, for messages
            files = {before + name: each for name, each in sorted(matches.items()) if _is_file(each)}
            if not files:
                raise
            return Remote(address, field, filesystem, files, is_folder=False)
        if info["type"] != "directory":
            return Remote(address, field, filesystem, {address: {**info, "name": path}}, is_folder=False)
        found = filesystem.find(path, detail=True)
        prefix = len(path.rstrip("/")) + 1
        files = {name[prefix:]: each for name, each in sorted(found.items()) if _is_file(each) and name[prefix:]}
        return Remote(address, field, filesystem, files, is_folder=True)

    try:
        return retried(ask, PAUSES_SECONDS[:1])
    except Exception as error:  # each library has its own
        raise UserError(problem_of(error, address, field, filesystem, path)) from None


def _is_file(info: Mapping[str, Any]) -> bool:
    return info["type"] == "file" and not str(info["name"]).endswith("/")  # some stores mark a folder by such a name
