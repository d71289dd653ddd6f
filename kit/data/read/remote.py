"""Data at a remote URL: a file, a folder or a glob, copied to this machine once.

Promises:

- The files of a URL are copied into the cache complete or not at all, by one process of a machine, and are then
  read as local files.
- Each start asks the store for the version of each file (its ETag, or what the store has like it). Where one differs,
  they are copied again, and then their content counts, as that of any local file.
- Nothing is taken from the cache without asking the store.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from kit.data.read.stores import PAUSES_SECONDS, is_final, open_filesystem, problem_of, retried
from kit.system import durable
from kit.system.cache import cache_folder, cannot_write, digest, locked
from kit.system.console import say
from kit.system.errors import UserError

# What tells versions of a file apart, as stores call it: hashes and versions first, then times.
_VERSIONS = "ETag etag generation md5Hash blob_id sha256 mtime LastModified last_modified updated created".split()
_Infos = Mapping[str, Mapping[str, Any]]  # what the store says of each file


def fetch(url: str, field: str) -> Path | dict[str, Path]:
    """Return where the files of a URL are on this machine; copy them if they are not there.

    For a folder, returns a folder; else each file under the name to show.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: nothing is there, it may not be read, the store cannot be reached, or a file changes meanwhile.
    """
    filesystem, path = open_filesystem(url, field)

    def ask() -> tuple[bool, _Infos, str]:
        """Whether the path is a folder; its files, by the names that they get here; and what tells them from others."""
        try:
            is_folder, infos = retried(partial(_look_up, filesystem, path), PAUSES_SECONDS[:1])
        except Exception as error:  # each library has its own
            raise UserError(problem_of(error, url, field, filesystem, path)) from None
        names = list(infos) if is_folder else [f"{i}/{PurePosixPath(name).name}" for i, name in enumerate(infos)]
        files = dict(zip(names, infos.values(), strict=True))
        return is_folder, files, digest(*((name, info["name"], version(info)) for name, info in files.items()))

    is_folder, files, versions = ask()
    folder = cache_folder() / "remote" / versions
    staging = durable.staging_of(folder)
    with locked(folder), cannot_write(folder.parent):
        if not folder.is_dir():
            say(f"copying {url} to the cache: {len(files)} files")
            try:
                _copy(filesystem, files, staging, url, field)
                if ask()[2] != versions:
                    fix = "type the same command again when nothing writes there"
                    raise UserError(field, f"{url!r} changed while it was copied", fix=fix)
                os.replace(staging, folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    if is_folder:
        return folder
    before = url.rstrip("/").removesuffix(path)  # for the URL of a file
    paths = [str(info["name"]) for info in files.values()]
    shown = [url] if paths == [path] else [before + each for each in paths]
    return dict(zip(shown, (folder / name for name in files), strict=True))


def _look_up(filesystem: Any, path: str) -> tuple[bool, _Infos]:
    """Whether a path is a folder, and its files: of a folder by the path in it, else by their whole path."""
    filesystem.invalidate_cache()
    try:
        info = filesystem.info(path)
    except FileNotFoundError:
        found = filesystem.glob(path, detail=True) if re.search(r"[*?\[]", path) else {}
        if files := {name: each for name, each in sorted(found.items()) if _is_file(each)}:
            return False, files
        raise
    if info["type"] != "directory":
        return False, {path: {**info, "name": path}}
    prefix = len(path.rstrip("/")) + 1
    found = filesystem.find(path, detail=True)
    return True, {name[prefix:]: each for name, each in sorted(found.items()) if _is_file(each) and name[prefix:]}


def _is_file(info: Mapping[str, Any]) -> bool:
    return info["type"] == "file" and not str(info["name"]).endswith("/")  # some stores mark a folder by such a name


def _copy(filesystem: Any, files: _Infos, folder: Path, url: str, field: str) -> None:
    """Copy files into a folder that is made for them."""
    durable.make_afresh(folder)
    for name, info in files.items():
        if ".." in PurePosixPath(name).parts:  # a store may hold such names; as a path it leads elsewhere
            raise UserError(field, f"{url!r} has a file called {name!r}", "no ..")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            retried(partial(filesystem.get_file, info["name"], str(folder / name)))
        except Exception as error:  # each library has its own
            if is_final(error) and isinstance(error, OSError) and error.errno:
                raise  # of the local disk
            raise UserError(problem_of(error, url, field)) from None
        if info.get("size") not in (None, (folder / name).stat().st_size):
            found = f"{url!r}: not all of {name!r} arrived, or it changed meanwhile"
            raise UserError(field, found, fix="type the same command again")


def version(info: Mapping[str, Any]) -> str:
    """Return what tells this version of a file from others: size, and hash, version or time, whichever there is."""
    key = next((key for key in _VERSIONS if info.get(key) is not None), "")  # one: stores do not always give the others
    value = info.get(key)
    value = value.timestamp() if isinstance(value, datetime) else value
    return json.dumps([info.get("size"), key.lower(), str(value).strip('"')])
