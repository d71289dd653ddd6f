"""Untrusted images: decoded within limits, as RGB of 8 bits.

Promises: nothing is decoded before its header was checked: format, pixels. So no image fills the memory.
"""

import base64
import io
from contextlib import suppress
from typing import Any

import numpy as np

from kit.system.errors import UserError

MAX_PIXELS = 1 << 26
MAX_RATIO = 200  # some processors make the shorter side a given number of pixels, whatever the longer one is then
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EXPECTED = "a still image: PNG, JPEG, WebP, BMP or GIF"
INSTALL = "python -m pip install pillow num2words"


def size_of(picture: Any) -> tuple[int, int]:
    """Return height and width, in pixels."""
    return picture.height, picture.width


def as_data_uri(picture: Any, file_format: str) -> str:
    """Return a JPEG or PNG file as a data: URI."""
    file = io.BytesIO()
    picture.save(file, file_format, quality=85)
    return f"data:image/{file_format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def decoded(content: bytes) -> Any:
    """Return an image as RGB of 8 bits (a ``PIL.Image``), turned as EXIF asks.

    What is transparent becomes white, of 16 bits the upper eight stay.

    Raises:
        UserError: it is of another format, or too large. ``Problem.where`` is empty.
        Exception: what Pillow raises if a file is damaged.
    """
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
