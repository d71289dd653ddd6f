"""Images of strangers: what their headers say, and their pixels, both within bounds.

Promises:

- Nothing is decoded before its header was checked: bytes, pixels, format. So no image fills the memory.
- A header is enough to know the size in which the model sees an image: turned as EXIF asks.
- An image that changes after its header was read is not trained on unseen.
- A path leads to a file below the folder that the user gave, or in which the data file lies; nothing is downloaded.
"""

import base64
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from kit.data.read.compressed import type_and_message
from kit.errors import Problem, UserError

MAX_BYTES = 1 << 26
MAX_PIXELS = 1 << 26
MAX_SIDE = 1 << 16  # what a processor makes of a longer one is as long, and wide
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EXPECTED = "a still picture: PNG, JPEG, WebP, BMP or GIF"
INSTALL = 'python -m pip install "accelerate-recipes[vision]"'
# Of the beginning, and of the end: read with the header anyway. Whole files would be read twice. Two pictures of as
# many bytes that differ between are taken for one: only formats without compression have such.
_HASHED_BYTES = 1 << 16
_ORIENTATION = 0x0112  # the tag of EXIF, whose values 5 to 8 exchange height and width
# What whole files hold near their end; others have their length in the header.
_ENDINGS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND", "GIF": b";"}
_LENGTHS: dict[str, Callable[[bytes], int]] = {
    "WEBP": lambda head: int.from_bytes(head[4:8], "little") + 8,
    "BMP": lambda head: int.from_bytes(head[2:6], "little"),
}


class Image(NamedTuple):
    """An image of a row, before its pixels are made."""

    data: bytes  # the content of the file; of one with a path, the path as the row has it, in UTF-8
    is_path: bool
    height: int  # turned as EXIF asks
    width: int
    digest: int  # of the number of bytes, and the first and last of them
    stamp: int  # of a file: of its size and its time; else 0


def find(path: str, folder: str) -> Path:
    """Return the file of a path in a row. Raises ``UserError`` if it is not below ``folder``."""
    root = os.path.realpath(os.path.expanduser(folder))
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(root.rstrip("/") + "/"):
        found = f"{path!r} is not below {folder or '.'}"
        fix = "--image_folder with the folder in which all images lie; paths are relative to it"
        raise UserError(Problem("", found, "a file there: nothing else of this machine is learned unseen", fix))
    return Path(target)


def stamp_of(file: Path) -> int:
    """Return a number that changes when a file does, from its size and its time; 0 if it cannot be seen."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return xxhash.xxh3_64_intdigest(f"{status.st_size} {status.st_mtime_ns}".encode())


def inspect(given: str | bytes, folder: str) -> Image:
    """Check the header of an image.

    Args:
        given: a path, or the content of a file.
        folder: to which paths are relative.

    Raises:
        UserError: it is no image that may be decoded. ``Problem.where`` is empty.
    """
    with _as_problem(str(given) if isinstance(given, str) else "the image"), _opened(given, folder) as file:
        size = file.seek(0, os.SEEK_END)
        if not 0 < size <= MAX_BYTES:
            raise UserError(Problem("", f"{size} bytes", f"1 to {MAX_BYTES >> 20} MiB"))
        file.seek(0)
        head = file.read(_HASHED_BYTES)
        file.seek(max(0, size - _HASHED_BYTES))
        tail = file.read()
        file.seek(0)
        picture = _open(file)
        height, width = picture.height, picture.width
        if height * width > MAX_PIXELS:
            raise UserError(Problem("", f"{width} x {height} pixels", f"at most {MAX_PIXELS >> 20} million"))
        if max(height, width) > MAX_SIDE:
            raise UserError(Problem("", f"{width} x {height} pixels", f"at most {MAX_SIDE:,} a side"))
        if getattr(picture, "is_animated", False) and picture.format != "MPO":
            raise UserError(Problem("", f"an animation of {picture.n_frames} pictures", EXPECTED))
        is_whole = _ENDINGS.get(picture.format, b"") in tail
        if picture.format in _LENGTHS:
            is_whole = size >= _LENGTHS[picture.format](head)
        if not is_whole:
            raise UserError(Problem("", f"a {picture.format} file that is cut short", "the whole file"))
        if _orientation(picture) >= 5:
            height, width = width, height
        is_path = isinstance(given, str)
        data = given.encode() if isinstance(given, str) else given
        stamp = stamp_of(find(given, folder)) if isinstance(given, str) else 0
        return Image(data, is_path, height, width, _digest(head, tail, size), stamp)


def pixels(image: Image, folder: str) -> Any:
    """Decode an image that ``inspect`` has returned, as RGB of 8 bits (a ``PIL.Image``).

    What is transparent becomes white, of 16 bits the upper eight stay.

    Raises:
        UserError: it cannot be decoded, or is another one than before. ``Problem.where`` is empty.
    """
    from PIL import Image as pil

    given = image.data.decode() if image.is_path else image.data
    with _as_problem(str(given) if image.is_path else "the image"), _opened(given, folder) as file:
        content = file.read(MAX_BYTES + 1)
        is_same = _digest(content[:_HASHED_BYTES], content[-_HASHED_BYTES:], len(content)) == image.digest
        if not is_same or (image.is_path and stamp_of(find(str(given), folder)) != image.stamp):
            fix = "start the command again: its size is read anew"
            raise UserError(Problem("", "changed since its header was read", fix=fix))
        picture = _open(io.BytesIO(content))
        turn = _orientation(picture)
        if picture.mode.startswith("I"):  # converted by Pillow, values above 255 would all be white
            picture = pil.fromarray((np.asarray(picture).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
        elif picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = pil.alpha_composite(pil.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("RGB")
        ways = pil.Transpose
        turns = {
            2: ways.FLIP_LEFT_RIGHT,
            3: ways.ROTATE_180,
            4: ways.FLIP_TOP_BOTTOM,
            5: ways.TRANSPOSE,
            6: ways.ROTATE_270,
            7: ways.TRANSVERSE,
            8: ways.ROTATE_90,
        }
        return picture.transpose(turns[turn]) if turn in turns else picture


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


def _open(file: BinaryIO) -> Any:
    """Read the header. Raises what Pillow does if it knows no such file."""
    from PIL import Image as pil

    try:
        return pil.open(file, formats=FORMATS)
    except pil.UnidentifiedImageError:
        raise UserError(Problem("", "no picture that is known", EXPECTED)) from None


def _orientation(picture: Any) -> int:
    """How EXIF turns a picture: 1 (as it is) to 8. What a PNG says behind its pixels is not read."""
    from PIL import Image as pil

    exif = pil.Exif()
    try:
        exif.load(picture.info.get("exif") or b"")
        turn = exif.get(_ORIENTATION, 1)
    except Exception:  # it may hold anything
        return 1
    return turn if turn in range(1, 9) else 1


@contextmanager
def _opened(given: str | bytes, folder: str) -> Iterator[BinaryIO]:
    if isinstance(given, bytes):
        yield io.BytesIO(given)
        return
    file = find(given, folder)
    if not file.is_file():
        fix = "--image_folder with the folder to which paths are relative, if that is not the one of the data file"
        raise UserError(Problem("", f"no file {given!r} in {folder or '.'}", fix=fix))
    with file.open("rb") as opened:
        yield opened


@contextmanager
def _as_problem(name: str) -> Iterator[None]:
    """Turn what a damaged file makes Pillow raise into a ``UserError``."""
    try:
        yield
    except UserError as error:
        if name == "the image":
            raise
        named = [
            p if name in p.found else Problem(p.where, f"{name}: {p.found}", p.expected, p.fix) for p in error.problems
        ]
        raise UserError(*named) from None
    except ImportError:
        raise UserError(Problem("", "images need Pillow, which is not installed", fix=INSTALL)) from None
    except Exception as error:
        raise UserError(Problem("", f"{name} cannot be decoded ({type_and_message(error)})", EXPECTED)) from None


def _digest(head: bytes, tail: bytes, size: int) -> int:
    return xxhash.xxh3_64_intdigest(size.to_bytes(8, "little") + head + tail)
