"""Untrusted images: decoded once, pixels within bounds, and a plain reason for each that is refused."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as pil

from kit.data.chat.media_parts import MARKS
from kit.data.kinds.preference import PreferenceRows
from kit.data.read import media_files
from kit.data.read.media_files import decoded, inspect
from kit.system.errors import UserError

IMAGE = MARKS["image"]

COLOURS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3  # height 6, width 4


def encoded(picture, format="PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def plain(format="PNG") -> bytes:
    return encoded(pil.fromarray(COLOURS), format)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def turned(orientation: int, format: str) -> bytes:
    exif = pil.Exif()
    exif[0x0112] = orientation
    return encoded(pil.fromarray(COLOURS), format, exif=exif)


def test_the_size_of_an_image_is_that_of_its_pixels_also_if_exif_turns_them():
    for format in ("PNG", "JPEG", "WEBP"):
        for orientation in range(1, 9):
            image = inspect("image", turned(orientation, format), "")
            picture = decoded(image, "")
            assert image.size == (picture.height, picture.width)
            assert (image.size[1] > image.size[0]) == (orientation >= 5)
    upright = np.asarray(decoded(inspect("image", turned(6, "PNG"), ""), ""))
    assert np.array_equal(upright, np.rot90(COLOURS, -1))  # 6: the camera was turned to the left


def test_other_modes_become_rgb_of_eight_bits():
    grey = np.linspace(0, 65535, 24).reshape(6, 4).astype(np.uint16)
    sixteen = np.asarray(decoded(inspect("image", encoded(pil.fromarray(grey)), ""), ""))
    assert np.array_equal(sixteen[..., 0], grey >> 8)
    half = pil.fromarray(np.dstack([COLOURS, np.full((6, 4), 0, np.uint8)]))
    assert (np.asarray(decoded(inspect("image", encoded(half), ""), "")) == 255).all()  # transparent: white
    row = struct.pack(">4H", 0, 1000, 30000, 65535)
    image = inspect("image", png(4, 1, b"\0" + row, 16, 0, chunk(b"tRNS", struct.pack(">H", 30000))), "")
    assert [value < 255 for value in np.asarray(decoded(image, ""))[0, :, 0].tolist()] == [True, True, False, False]
    for mode in ("1", "L", "LA", "P", "CMYK"):
        format = "JPEG" if mode == "CMYK" else "PNG"
        picture = decoded(inspect("image", encoded(pil.fromarray(COLOURS).convert(mode), format), ""), "")
        assert (picture.mode, picture.size) == ("RGB", (4, 6))


def animated(format: str) -> bytes:
    frames = [pil.fromarray(np.roll(COLOURS, i, axis=0)) for i in range(3)]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


def with_thumbnail(length: int) -> bytes:
    """A JPEG whose EXIF holds the end mark of another one."""
    picture = pil.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    return encoded(picture, "JPEG", exif=b"Exif\0\0" + plain("JPEG"))[:length]


def test_what_follows_a_whole_image_does_not_matter():
    for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        whole, longer = plain(format), plain(format) + b"ftyp" * 20000  # as a motion photo holds its video
        assert np.array_equal(*(np.asarray(decoded(inspect("image", each, ""), "")) for each in (whole, longer)))


def test_what_cannot_or_may_not_be_decoded_is_refused(monkeypatch):
    monkeypatch.setattr(media_files, "MAX_BYTES", 5000)
    damaged = bytearray(plain())
    damaged[damaged.index(b"IDAT") + 20] ^= 255
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    for given, found in (
        (b"\0" * 5001, "5001 bytes; expected 1 to"),
        (b"not a picture", "no known image format; expected a still image"),
        (svg, "no known image format"),
        (encoded(pil.fromarray(COLOURS), "TIFF"), "no known image format"),
        (encoded(pil.fromarray(COLOURS), "PDF"), "no known image format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known image format"),
        (png(9000, 9000), "9000 x 9000 pixels; expected at most 64 million"),
        (png(1, 2**25), "1 x 33554432 pixels; expected one side at most 200 times"),
        (png(2**31 - 1, 2**31 - 1), "decompression bomb"),
        (animated("GIF"), "an animation of 3 frames"),
        (animated("WEBP"), "an animation of 3 frames"),
        (animated("PNG"), "an animation of 3 frames"),
        (png(4, 6, b"\0" * 5), "the image cannot be decoded"),  # fewer pixels than the header says
        (bytes(damaged), "the image cannot be decoded"),
        (with_thumbnail(3000), "the image cannot be decoded"),
        *((plain(format)[:-20], "cannot be decoded") for format in ("JPEG", "WEBP", "BMP", "GIF")),
        (plain()[:-30], "cannot be decoded"),
        (plain()[:20], "cannot be decoded"),
    ):
        with pytest.raises(UserError, match=found):
            inspect("image", given, "")


def test_a_path_leads_nowhere_but_below_the_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(plain())
    (tmp_path / "data/own.png").write_bytes(plain())
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    folder = str(tmp_path / "data")
    assert inspect("image", "own.png", folder).size[1] == 4
    for path in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "own.png/../../secret.png"):
        with pytest.raises(UserError, match="not below"):
            inspect("image", path, folder)
    assert inspect("image", "secret.png", str(tmp_path)).size[1] == 4
    with pytest.raises(UserError, match=r"absent\.png: no such file"):
        inspect("image", "absent.png", folder)


def test_a_file_that_changes_is_not_decoded(tmp_path):
    picture, file = np.zeros((300, 300, 3), np.uint8), tmp_path / "a.bmp"
    file.write_bytes(encoded(pil.fromarray(picture), "BMP"))
    image = inspect("image", "a.bmp", str(tmp_path))
    assert not np.asarray(decoded(image, str(tmp_path))).any()
    picture[150] = 255
    file.write_bytes(encoded(pil.fromarray(picture), "BMP"))
    with pytest.raises(UserError, match=r"a\.bmp: changed since"):
        decoded(image, str(tmp_path))


URI = "data:image/png;base64," + base64.b64encode(plain()).decode()


def test_the_known_forms_of_an_image_are_read_and_urls_are_not():
    from data_helpers import converted, problems_of, sample_of

    def row(part, **more):
        return {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}], **more}

    source = {"type": "base64", "media_type": "image/png", "data": URI.partition(",")[2]}
    for part, expected in (
        ({"type": "image_url", "image_url": {"url": URI}}, plain()),
        ({"type": "image_url", "image_url": URI}, plain()),
        ({"type": "image", "source": source}, plain()),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "path": "file:///a%20b.png"}, "/a b.png"),
        ({"type": "image", "base64": URI.partition(",")[2]}, plain()),
        ({"type": "image", "image": {"bytes": plain(), "path": None}}, plain()),
    ):
        sample = sample_of(row(part))
        assert (sample["media"], sample["messages"][0]["content"]) == ([("image", expected)], IMAGE)
    marked = {
        "instruction": "<image> and <image>?",
        "output": "b",
        "images": ["a.png", {"bytes": plain(), "path": "x"}],
    }
    sample = sample_of(marked)
    assert ([each for _, each in sample["media"]], sample["messages"][0]["content"]) == (
        ["a.png", plain()],
        f"{IMAGE} and {IMAGE}?",
    )
    for cell, expected in (
        ('["a.png", "b.png"]', ["a.png", "b.png"]),  # as CSV files hold lists
        ('{"path": "a.png"}', ["a.png"]),
        ("[a].png", ["[a].png"]),
        ("[]", None),
    ):
        found = sample_of({"instruction": "what?", "output": "b", "images": cell}).get("media")
        assert found == (expected and [("image", each) for each in expected])
    assert "none; expected an image" in problems_of({"images": "[null]", "output": "a"})
    unmarked = sample_of({"instruction": "what?", "output": "b", "images": ["a.png"]})
    assert unmarked["messages"][0]["content"] == f"{IMAGE}what?"
    assert "media" not in sample_of({"instruction": "what?", "output": "b", "images": [{"bytes": None, "path": None}]})
    for given, found in (
        (
            row({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
            "a URL (https://example.org",
        ),
        (row({"type": "image"}, images=["a", "b"]), "2 of them for 1 places"),
        (row({"type": "image", "image": 3}), "a number; expected a path"),
        (row({"type": "image", "image": "a", "text": "b"}), "the key 'text' of an image"),
        (row({"type": "image", "base64": "§"}), "not base64"),
        ({"instruction": "<image>", "output": "b", "images": ["a", "b"]}, "2 of them for 1 places"),
        ({"instruction": "<image>", "output": "b", "images": None}, "none for 1 marks"),
        ({"instruction": "<image><audio>", "output": "b", "images": [], "audio": ["a"]}, "none for 1 marks <image>"),
        ({"instruction": "a", "output": "b", "images": [URI.partition(",")[2] * 99]}, '"data:image/png;base64,"'),
        ({"prompt": "a", "completion": "b", "images": ["a"]}, "given with plain texts"),
        (
            {"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": "a"}], "images": ["a"]},
            "U+FDD2",
        ),
    ):
        assert found in problems_of(given)
    pair = {"chosen": "b", "rejected": "c", "prompt": "a", "images": ["a"]}
    (problem,) = converted(pair, {name: name for name in pair}, kind=PreferenceRows)
    assert problem.fix.startswith("--dataset_columns prompt=instruction makes")
    assert "media" not in sample_of({"instruction": "<image>", "output": "b"})  # a text like any other
    answer = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [{"type": "image", "path": "a"}]}]
    assert sample_of({"messages": answer})["media"] == [("image", "a")]
