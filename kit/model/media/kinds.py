"""What images and sounds differ in: the part of a processor that takes them, and how it gets them of a file.

Promises: the settings of a processor are within limits, so that nothing of a row fills the memory.
"""

import io
from importlib import import_module
from typing import Any

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.chat.media_parts import as_wav
from kit.data.media import Media
from kit.data.read import audio_files, image_files
from kit.data.read.media_files import decoded
from kit.system.errors import UserError

# The least and the most that a number in a setting of a processor may be.
_BOUNDS = {
    **dict.fromkeys(("size", "crop_size", "pad_size", "image_grid_pinpoints"), (32, 2048)),
    "max_image_size": (32, 4096),
    **dict.fromkeys(("image_seq_length", "image_seq_len", "num_additional_image_tokens"), (0, 2048)),
    **dict.fromkeys(("max_patches", "pan_and_scan_max_num_crops", "merge_size"), (0, 64)),
    "patch_size": (4, 2048),
    "temporal_patch_size": (1, 4),
    "sampling_rate": audio_files.RATES,
    **dict.fromkeys(("feature_size", "n_mels", "num_mel_bins"), (1, 1024)),
    **dict.fromkeys(("n_fft", "fft_length", "win_length", "frame_length", "hop_length"), (16, 1 << 14)),
    "chunk_length": (1, audio_files.MAX_SECONDS),
}


class Images:
    """Images as ``PIL.Image``. A size is height and width.

    Attributes:
        part: of the processor.
        options: of the processor.
        blank_options: more of them, with which it makes the text of blanks.
        in_pixels: its ``size`` is numbers of pixels, as Qwen's, and not lengths of sides.
    """

    argument = "images"
    # The part for videos is asked for settings that it shares with the one for images, at most.
    parts = ("image_processor", "video_processor")
    # With images of these sizes the processor is tried.
    sizes = ((64, 64), (40, 300), (1200, 900))

    def __init__(self, name: str, options: dict[str, Any], data: DataSettings) -> None:
        _check_packages(self.argument, ("PIL",), image_files.INSTALL)
        from transformers import AutoImageProcessor  # slow to import

        self.part = AutoImageProcessor.from_pretrained(name, **options)
        self.options: dict[str, Any] = {}
        self.blank_options = {"do_rescale": False, "do_normalize": False}  # of an image without content
        self.in_pixels = hasattr(self.part, "merge_size")
        check_bounds("image", self.part.to_dict(), self.in_pixels)
        limits = {"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels}
        if any(limits.values()):
            if not self.in_pixels:
                setting = "min_pixels" if data.min_pixels else "max_pixels"
                raise UserError(setting, f"given, and {type(self.part).__name__} has no such limit")
            size = dict(self.part.size) | {edge: value for edge, value in limits.items() if value}
            if size["shortest_edge"] > size["longest_edge"]:
                raise UserError("max_pixels", f"{size['longest_edge']}, below min_pixels {size['shortest_edge']}")
            self.part.size = size

    def read(self, media: Media, folder: str) -> Any:
        """Return an image of a row. Raises ``UserError``."""
        return decoded(media, folder)

    def blank(self, size: tuple[int, int]) -> Any:
        """Return an image without content."""
        from PIL import Image as pil

        return pil.new("RGB", size[::-1])

    def noise(self, seed: int) -> bytes:
        """Return a file of random colours, whose size depends on ``seed``."""
        from PIL import Image as pil

        colours = np.random.default_rng(seed).integers(256, size=(64, 64 * (1 + seed % 3), 3), dtype=np.uint8)
        pil.fromarray(colours).save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    def describe(self, size: tuple[int, int]) -> str:
        """Return a size for the user."""
        return f"{size[1]} x {size[0]} pixels"


class Sounds:
    """Sounds as samples at the rate of the processor, float32 [N]. A size is a number of samples, and their rate."""

    argument = "audio"
    parts = ("feature_extractor", "audio_processor")
    sizes = ((2, 5), (3, 5), (1, 1))  # 0.4, 0.6 and 1 second

    def __init__(self, name: str, options: dict[str, Any], data: DataSettings) -> None:
        _check_packages(self.argument, ("soundfile", "soxr"), audio_files.INSTALL)
        from transformers import AutoFeatureExtractor, FeatureExtractionMixin

        # Its filters are made when it is opened.
        check_bounds("audio", FeatureExtractionMixin.get_feature_extractor_dict(name, **options)[0])
        self.part = AutoFeatureExtractor.from_pretrained(name, **options)
        self.options = {"sampling_rate": int(self.part.sampling_rate)}  # it would warn without
        self.blank_options = {"truncation": False}

    def read(self, media: Media, folder: str) -> np.ndarray:
        """Return a sound of a row. Raises ``UserError``."""
        return audio_files.resampled(decoded(media, folder), self.options["sampling_rate"])

    def blank(self, size: tuple[int, int]) -> np.ndarray:
        """Return silence."""
        return np.zeros(audio_files.resampled_length(*size, self.options["sampling_rate"]), np.float32)

    def noise(self, seed: int) -> bytes:
        """Return a file of noise, whose length depends on ``seed``."""
        rate = self.options["sampling_rate"]
        samples = np.random.default_rng(seed).normal(scale=0.1, size=int((0.4 + 0.2 * (seed % 3)) * rate))
        return as_wav(samples.tolist(), rate)

    def describe(self, size: tuple[int, int]) -> str:
        """Return a size for the user."""
        return f"{size[0] / size[1]:.5g} seconds"


def _check_packages(argument: str, names: tuple[str, ...], install: str) -> None:
    try:
        for name in names:
            import_module(name)
    except (ImportError, OSError):  # OSError: without the library libsndfile
        raise UserError(argument, f"they need {' and '.join(names)}, not installed", fix=install) from None


def check_bounds(kind: str, settings: dict[str, Any], in_pixels: bool = False) -> None:
    """Raise ``UserError`` if a setting of a processor could make an image or a sound fill the memory."""
    for name, (least, most) in _BOUNDS.items():
        if name == "size" and in_pixels:
            most = image_files.MAX_PIXELS
        if name == "max_patches" and isinstance(settings.get("patch_size"), int):
            # They are no tiles, but the patches of the encoder.
            most = image_files.MAX_PIXELS // settings["patch_size"] ** 2
        value = least if settings.get(name) is None else settings[name]
        if isinstance(value, dict) and any("pixels" in key for key in value):
            most = image_files.MAX_PIXELS
        numbers = np.array([*value.values()] if isinstance(value, dict) else value, np.float64)
        if not ((least <= numbers) & (numbers <= most)).all():
            raise UserError("model_name_or_path", f"its {kind} processor has {name} {value}", f"{least} to {most:,}")
