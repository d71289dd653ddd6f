"""Untrusted images: check that they decode, and load their pixels, within limits.

Promises:

- Nothing is decoded before its header was checked: bytes, pixels, format. So no image fills the memory.
- Every image is decoded once when samples are made, so that a damaged one is a problem of its row, and not of a step.
- An image that changes after that is not trained on unseen.
- A path leads to a file below the folder that the user gave, or in which the data file lies; nothing is downloaded.
"""

import base64
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kit.data.read.compressed import type_and_message
from kit.system.errors import UserError

MAX_BYTES = 1 << 26
MAX_PIXELS = 1 << 26
MAX_RATIO = 200  # some processors make the shorter side a given number of pixels, whatever the longer one is then
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EXPECTED = "a still image: PNG, JPEG, WebP, BMP or GIF"
INSTALL = "python -m pip install pillow num2words"


class Image(NamedTuple):
    """An image of a row, before its pixels are made."""

    data: bytes  # the content of the file; of one with a path, the path as the row has it, in UTF-8
    is_path: bool
    height: int  # turned as EXIF asks
    width: int
    digest: int  # of the content
    stamp: int  # of a file: of its size and its time; else 0


def find(path: str, folder: str) -> Path:
    """Return the file of a path in a row. Raises ``UserError`` if it is not below ``folder``."""
    root = os.path.realpath(os.path.expanduser(folder))
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(root.rstrip("/") + "/"):
        found = f"not below {folder or '.'}"
        fix = "--image_folder with the folder of all images, to which their paths are relative"
        raise UserError("", found, "a file below it: the run reads no other files", fix)
    return Path(target)


def stamp_of(file: Path) -> int:
    """Return a number that changes when a file does, from its size and its time; 0 if it cannot be seen."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return xxhash.xxh3_64_intdigest(f"{status.st_size} {status.st_mtime_ns}".encode())


def inspect(given: str | bytes, folder: str) -> Image:
    """Decode an image once. Its pixels are not kept.

    Args:
        given: a path, or the content of a file.
        folder: to which paths are relative.

    Raises:
        UserError: it is no image that can or may be decoded. ``Problem.where`` is empty.
    """
    with _as_problem(given):
        is_path = isinstance(given, str)
        data = given.encode() if isinstance(given, str) else given
        stamp = stamp_of(find(given, folder)) if isinstance(given, str) else 0
        content = _read(given, folder)
        picture = _decoded(content)
        return Image(data, is_path, picture.height, picture.width, xxhash.xxh3_64_intdigest(content), stamp)


def pixels(image: Image, folder: str) -> Any:
    """Decode an image that ``inspect`` has returned, as RGB of 8 bits (a ``PIL.Image``).

    What is transparent becomes white, of 16 bits the upper eight stay.

    Raises:
        UserError: it is another one than before. ``Problem.where`` is empty.
    """
    given = image.data.decode() if image.is_path else image.data
    with _as_problem(given):
        content = _read(given, folder)
        if xxhash.xxh3_64_intdigest(content) != image.digest:
            fix = "start the command again, which reads the new content"
            raise UserError("", "changed since its row was read", fix=fix)
        return _decoded(content)


def small(image: Image, folder: str, side: int) -> str:
    """Return a JPEG of at most ``side`` x ``side`` pixels as a data: URI; empty if the image cannot be decoded."""
    try:
        picture = pixels(image, folder)
    except UserError:
        return ""
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _read(given: str | bytes, folder: str) -> bytes:
    """Return the content of an image of at most ``MAX_BYTES``. Raises ``UserError``."""
    if isinstance(given, bytes):
        content = given
    else:
        file = find(given, folder)
        if not file.is_file():
            fix = "--image_folder with the folder to which paths are relative, if that is not the one of the data file"
            raise UserError("", f"no such file in {folder or '.'}", fix=fix)
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    if not 0 < len(content) <= MAX_BYTES:
        raise UserError("", f"{len(content)} bytes", f"1 to {MAX_BYTES >> 20} MiB")
    return content


def _decoded(content: bytes) -> Any:
    """Check the header, then decode. Raises ``UserError``, and what Pillow does if a file is damaged."""
    from PIL import Image as pil
    from PIL import ImageOps

    try:
        picture: Any = pil.open(io.BytesIO(content), formats=FORMATS)
    except pil.UnidentifiedImageError:
        raise UserError("", "no known image format", EXPECTED) from None
    width, height = picture.size
    if height * width > MAX_PIXELS:
        raise UserError("", f"{width} x {height} pixels", f"at most {MAX_PIXELS >> 20} million")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise UserError("", f"{width} x {height} pixels", f"one side at most {MAX_RATIO} times the other")
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise UserError("", f"an animation of {picture.n_frames} frames", EXPECTED)
    picture.load()
    with suppress(Exception):  # EXIF may hold anything
        ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I"):  # converted by Pillow, values above 255 would all be white
        grey = np.asarray(picture)
        grey = np.where(grey == picture.info.get("transparency"), 65535, grey).astype(np.uint32) >> 8
        picture = pil.fromarray(grey.clip(0, 255).astype(np.uint8))
    elif picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = pil.alpha_composite(pil.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


@contextmanager
def _as_problem(given: str | bytes) -> Iterator[None]:
    """Turn Pillow's exceptions for a damaged file into a ``UserError`` that names the file."""
    name = given if isinstance(given, str) else "the image"
    try:
        yield
    except UserError as error:
        raise UserError(*(replace(p, found=f"{name}: {p.found}") for p in error.problems)) from None
    except Exception as error:
        raise UserError("", f"{name} cannot be decoded ({type_and_message(error)})", EXPECTED) from None
