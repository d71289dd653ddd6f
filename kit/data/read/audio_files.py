"""Untrusted sounds: check that they decode, and make one channel of them at a given rate, within limits.

Promises:

- Nothing is decoded before its header was checked: format, rate, channels, length. No clip decodes to more samples than
  its header says. So none fills the memory.
- A file that ends early, as far as its format shows it, and one whose samples are no audio, is refused.
"""

import io
import re
from typing import Any

import numpy as np

from kit.data.read.compressed import type_and_message
from kit.system.errors import UserError

MAX_SECONDS = 1800
MAX_SAMPLES = 1 << 26  # of one channel: 256 MiB as float32
MAX_CHANNELS = 8
RATES = (4000, 384000)  # Hz
MAX_PEAK = 16.0  # of 1, full scale: decoded MP3 goes a little beyond; integers given as float go to 32768
BEGINNINGS = re.compile(rb"RIFF....WAVE|fLaC|OggS|ID3|\xff[\xe2-\xff]", re.DOTALL)
EXPECTED = "audio: WAV, FLAC, MP3 or Ogg"
INSTALL = "python -m pip install soundfile soxr"
_BLOCK = 1 << 16  # samples decoded at once
_STREAM = 0x7FFF0000  # a size of a WAV that nobody knew when the header was written is about this, or twice as much


Sound = tuple[np.ndarray, int]  # the mean of its channels, float32 [N], and its rate in Hz


def decoded(content: bytes) -> Sound:
    """Check the header of a file, then decode it. Raises ``UserError``."""
    import soundfile

    if not BEGINNINGS.match(content):
        raise UserError("", "no known format of sounds", EXPECTED)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            _check_header(file, content)
            made, end = np.zeros(file.frames, np.float32), 0
            for block in file.blocks(_BLOCK, frames=file.frames, dtype="float32", always_2d=True):
                made[end : end + len(block)] = block.mean(axis=1)
                end += len(block)
            rate = int(file.samplerate)
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "error_string", None) or type_and_message(error)
        raise UserError("", f"cannot be decoded ({reason.strip()})", EXPECTED) from None
    if end < len(made) or _ends_early(content):
        raise UserError("", "ends before its header says", "a whole file")
    peak = float(np.abs(made).max())
    if not peak <= MAX_PEAK:  # NaN is not
        raise UserError("", f"samples up to {peak:g}", "-1 to 1")
    return made, rate


def size_of(sound: Sound) -> tuple[int, int]:
    """Return the number of a sound's samples, and its rate."""
    return len(sound[0]), sound[1]


def resampled_length(num_samples: int, rate: int, to: int) -> int:
    """Return how many samples a sound has at the rate ``to``."""
    return max(1, (2 * num_samples * to + rate) // (2 * rate))


def resampled(sound: Sound, to: int) -> np.ndarray:
    """Return the samples of a sound at the rate ``to``, float32 [N]."""
    import soxr

    samples, rate = sound
    if rate == to:
        return samples
    made = np.zeros(resampled_length(len(samples), rate, to), np.float32)
    found = soxr.resample(samples, rate, to)[: len(made)]
    made[: len(found)] = found
    return made


def _check_header(file: Any, content: bytes) -> None:
    """Raise ``UserError`` if a sound, opened and not decoded, is none that may be."""
    least, most = RATES
    if not least <= file.samplerate <= most:
        raise UserError("", f"{file.samplerate} Hz", f"{least} to {most}")
    if file.channels > MAX_CHANNELS:
        raise UserError("", f"{file.channels} channels", f"at most {MAX_CHANNELS}")
    if file.frames < 1:
        raise UserError("", "no samples", EXPECTED)
    if file.frames > min(MAX_SAMPLES, MAX_SECONDS * file.samplerate):
        found = f"{file.frames} samples at {file.samplerate} Hz"
        raise UserError("", found, f"at most {MAX_SECONDS // 60} minutes and {MAX_SAMPLES >> 20} million")
    size = re.search(r"^data : (\d+) \(should be (\d+)\)", file.extra_info, re.MULTILINE)
    if size and int(size[2]) < int(size[1]) < _STREAM:
        raise UserError("", f"{size[2]} bytes of {size[1]}", "a whole file")


def _ends_early(content: bytes) -> bool:
    """Whether an Ogg file has no last page, or an MP3 file fewer bytes than its first frame says."""
    if content.startswith(b"OggS"):
        return not content[content.rfind(b"OggS") + 5] & 4
    info = re.search(rb"(?:Xing|Info)\0\0\0(.)", content[: 1 << 12], re.DOTALL)
    if info is None or content.startswith((b"RIFF", b"fLaC")) or not info[1][0] & 2:
        return False
    at = info.end() + (4 if info[1][0] & 1 else 0)
    return len(content) - info.start() < int.from_bytes(content[at : at + 4]) - 200  # a frame begins before it
