"""Untrusted images and audio of rows: check that they decode, and decode them again when a batch is made.

Promises:

- Every file is decoded once when samples are made, so that a damaged one is a problem of its row, and not of a step.
- A file that changes after that is not trained on unseen.
- A path leads to a file below the folder that the user gave, or in which the data file lies; nothing is downloaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from kit.data.media import Media, MediaKind
from kit.data.read import audio_files, image_files
from kit.data.read.compressed import type_and_message
from kit.system.errors import UserError

MAX_BYTES = 1 << 26
# Modules with ``decoded``, ``size_of`` and ``EXPECTED``.
_FILES: dict[MediaKind, Any] = {"image": image_files, "audio": audio_files}


def find(path: str, folder: str) -> Path:
    """Return the file of a path in a row. Raises ``UserError`` if it is not below ``folder``."""
    root = os.path.realpath(os.path.expanduser(folder))
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(root.rstrip("/") + "/"):
        found = f"not below {folder or '.'}"
        fix = "--media_folder with the folder of all media, to which their paths are relative"
        raise UserError("", found, "a file below it: the run reads no other files", fix)
    return Path(target)


def stamp_of(file: Path) -> int:
    """Return a number that changes when a file does, from its size and its time; 0 if it cannot be seen."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return xxhash.xxh3_64_intdigest(f"{status.st_size} {status.st_mtime_ns}".encode())


def inspect(kind: MediaKind, given: str | bytes, folder: str) -> Media:
    """Decode a file once. What is in it is not kept.

    Args:
        given: a path, or the content of a file.
        folder: to which paths are relative.

    Raises:
        UserError: it cannot or may not be decoded. ``Problem.where`` is empty.
    """
    with _as_problem(kind, given):
        is_path = isinstance(given, str)
        data = given.encode() if isinstance(given, str) else given
        stamp = stamp_of(find(given, folder)) if isinstance(given, str) else 0
        content = _read(given, folder)
        size = _FILES[kind].size_of(_FILES[kind].decoded(content))
        return Media(kind, data, is_path, size, xxhash.xxh3_64_intdigest(content), stamp)


def decoded(media: Media, folder: str) -> Any:
    """Decode what ``inspect`` has returned: an image as a ``PIL.Image``, a sound as ``audio_files.Sound``.

    Raises:
        UserError: it is another one than before. ``Problem.where`` is empty.
    """
    given = media.data.decode() if media.is_path else media.data
    with _as_problem(media.kind, given):
        content = _read(given, folder)
        if xxhash.xxh3_64_intdigest(content) != media.digest:
            fix = "start the command again, which reads the new content"
            raise UserError("", "changed since its row was read", fix=fix)
        return _FILES[media.kind].decoded(content)


def small(media: Media, folder: str, side: int) -> str:
    """Return a JPEG of at most ``side`` x ``side`` pixels as a data: URI; empty if there is none to make."""
    if media.kind != "image":
        return ""
    try:
        (picture := decoded(media, folder)).thumbnail((side, side))
        return image_files.as_data_uri(picture, "JPEG")
    except UserError:
        return ""


def _read(given: str | bytes, folder: str) -> bytes:
    """Return the content of a file of at most ``MAX_BYTES``. Raises ``UserError``."""
    if isinstance(given, bytes):
        content = given
    else:
        file = find(given, folder)
        if not file.is_file():
            fix = "--media_folder with the folder to which paths are relative, if that is not the one of the data file"
            place = "" if os.path.isabs(given) else f" in {folder or '.'}"
            raise UserError("", f"no such file{place}", fix=fix)
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    if not 0 < len(content) <= MAX_BYTES:
        raise UserError("", f"{len(content)} bytes", f"1 to {MAX_BYTES >> 20} MiB")
    return content


@contextmanager
def _as_problem(kind: MediaKind, given: str | bytes) -> Iterator[None]:
    """Turn a decoder's exceptions for a damaged file into a ``UserError`` that names the file."""
    name = given if isinstance(given, str) else f"the {kind}"
    try:
        yield
    except UserError as error:
        raise UserError(*(replace(p, found=f"{name}: {p.found}") for p in error.problems)) from None
    except Exception as error:
        expected = _FILES[kind].EXPECTED
        raise UserError("", f"{name} cannot be decoded ({type_and_message(error)})", expected) from None
