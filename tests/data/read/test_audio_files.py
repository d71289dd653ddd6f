"""Untrusted sounds: decoded once within limits, and a plain reason for each that is refused."""

import io
import struct
from functools import cache

import numpy as np
import pytest
import soundfile

from kit.data.chat.media_parts import as_wav
from kit.data.read.audio_files import decoded, resampled, resampled_length, size_of
from kit.system.errors import UserError

RATE = 16000
TONE = (0.3 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)  # a second


def encoded(sound, format="WAV", rate=RATE, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=format, **options)
    return file.getvalue()


WAV, FLAC, OGG, MP3 = (encoded(TONE, format) for format in ("WAV", "FLAC", "OGG", "MP3"))
NOISY = encoded(np.random.default_rng(0).normal(size=10 * RATE).astype(np.float32) / 10, "OGG")


def length(content: bytes) -> tuple[int, int]:
    return size_of(decoded(content))


def samples(content: bytes, rate: int) -> np.ndarray:
    return resampled(decoded(content), rate)


def changed(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


@cache
def hostile() -> dict[str, tuple[bytes, str]]:
    unknown = bytes([FLAC[21] & 0xF0]) + bytes(4)  # the 36 bits of the number of samples
    ten_hours = (10 * 3600 * RATE).to_bytes(4)
    return {
        "empty": (b"", "no known format"),
        "text named .wav": (b"hello " * 100, "no known format"),
        "text after a header": (b"RIFF....WAVEfmt " + b"nonsense" * 30, "cannot be decoded"),
        "another format of libsndfile": (encoded(TONE, "AU"), "no known format"),
        "no samples": (encoded(TONE[:0]), "no samples"),
        "half a WAV": (WAV[: len(WAV) // 2], "bytes of 32000"),
        "half a FLAC": (FLAC[: len(FLAC) // 2], "cannot be decoded"),
        "half an Ogg": (NOISY[: len(NOISY) // 2], "ends before its header says"),
        "nine tenths of an MP3": (MP3[: len(MP3) * 9 // 10], "ends before its header says"),
        "a FLAC with a flipped byte": (changed(FLAC, 200, bytes([FLAC[200] ^ 255])), "cannot be decoded"),
        "0 Hz": (changed(WAV, 24, bytes(4)), "cannot be decoded"),
        "1e9 Hz": (changed(WAV, 24, struct.pack("<I", 10**9)), "1000000000 Hz"),
        "96 channels": (encoded(np.zeros((100, 96), np.float32)), "96 channels"),
        "10 hours in the header": (changed(FLAC, 21, bytes([FLAC[21] & 0xF0]) + ten_hours), "576000000 samples"),
        "no length in the header": (changed(FLAC, 21, unknown), "samples at 16000 Hz"),
        "a minute in 10 KB": (
            changed(encoded(np.zeros(60 * RATE, np.float32), "FLAC"), 21, FLAC[21:22] + ten_hours),
            "576",
        ),
        "NaN": (as_wav(np.full(100, np.nan, np.float32), RATE), "nan"),
        "infinity": (as_wav(np.full(100, np.inf, np.float32), RATE), "inf"),
        "integers as float": (as_wav(TONE * 32768, RATE), "samples up to 98"),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_is_no_sound_within_limits_is_refused_with_its_reason(name):
    content, reason = hostile()[name]
    with pytest.raises(UserError, match=reason) as raised:
        length(content)
    assert "object at" not in str(raised.value)


def test_a_sound_is_the_same_in_every_format_but_for_what_a_codec_loses():
    for content, most in (
        (WAV, 1e-4),
        (FLAC, 1e-4),
        (OGG, 0.05),
        (MP3, 0.05),
        (encoded(TONE, "OGG", subtype="OPUS"), 0.05),
    ):
        assert length(content) == (RATE, RATE)
        assert np.abs(samples(content, RATE) - TONE)[1000:-1000].max() < most


def test_codecs_that_cannot_be_sought_in_are_read():
    gsm = encoded(TONE, subtype="GSM610", rate=8000)
    num, rate = length(gsm)
    assert rate == 8000 and RATE <= num < RATE + 320  # whole frames


def test_what_comes_after_a_sound_and_before_it_does_no_harm():
    for content in (WAV, FLAC, OGG, MP3):
        assert length(content + bytes(range(256)) * 20) == (RATE, RATE)
    tag = b"ID3\x03\0\0\0\0\x0f\x76" + bytes(2038)
    assert length(tag + MP3) == (RATE, RATE)
    streamed = changed(WAV, WAV.index(b"data") + 4, b"\xff" * 4)  # as of a pipe, whose length nobody knew
    assert length(streamed) == (RATE, RATE)


def test_channels_become_their_mean():
    stereo = encoded(np.stack([TONE, np.zeros_like(TONE)], axis=1), subtype="FLOAT")
    assert np.array_equal(samples(stereo, RATE), TONE / 2)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_a_resampled_sound_has_the_length_known_before_and_the_same_tone(rate):
    for num in (1, 7, rate // 3, rate):
        sound = samples(as_wav(np.zeros(num, np.float32), rate), RATE)
        assert len(sound) == resampled_length(num, rate, RATE) == max(1, round(num * RATE / rate))
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    made = samples(as_wav(tone, rate), RATE)
    assert np.abs(made - TONE)[1000:-1000].max() < 1e-3
    assert np.array_equal(made, samples(as_wav(tone, rate), RATE))


def test_an_array_is_a_file_without_loss():
    assert np.array_equal(samples(as_wav(TONE, RATE), RATE), TONE)
    assert as_wav(TONE, RATE) == as_wav(TONE.copy(), RATE)
