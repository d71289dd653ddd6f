"""Inputs of vision-language models: image placeholders in the text, inputs of the vision tower, and positions.

All of it comes from the model's own processor and code. Only families are supported whose loss and
gradients are proven to be those of their own forward (``FAMILIES``).

Promises:

- The text of an image depends on its size alone, and is known before any pixel is read. When its pixels are made, their
  text must be the same: so there are as many placeholders as features.
- Every rank runs the tower in every micro-batch: without an image in it, on one that nothing looks at.
"""

import copy
import io
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch

from kit.config.settings.data import DataSettings
from kit.config.settings.model import ModelSettings
from kit.data.media import Media, MediaKind
from kit.data.read.image_files import INSTALL, MAX_PIXELS
from kit.data.read.media_files import decoded, inspect
from kit.model.pretrained.locate import hub_options, locate_model
from kit.system.cache import digest
from kit.system.errors import Problem, UserError, first_line

# Families whose loss and gradients with images are those of their own forward (tests/model/test_images.py).
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"),
    *("idefics3", "llava", "llava_next", "internvl"),
)
_SIZES = ((64, 64), (40, 300), (1200, 900))  # in which it is seen whether the text is made of placeholders alone
_DIGESTS = 3  # the version of ``Media.digest``, which cache entries hold
_MOST_SIZES = 1 << 16  # whose texts are kept
# The least and the most that a number in a setting of a processor may be. Of Qwen, ``size`` is in pixels.
_BOUNDS = {
    **dict.fromkeys(("size", "crop_size", "max_image_size", "pad_size", "image_grid_pinpoints"), (32, 2048)),
    **dict.fromkeys(("image_seq_length", "image_seq_len", "num_additional_image_tokens"), (0, 2048)),
    **dict.fromkeys(("max_patches", "pan_and_scan_max_num_crops", "merge_size"), (0, 64)),
    "patch_size": (4, 2048),
    "temporal_patch_size": (1, 4),
}
OfSegment = Sequence[tuple[Media, str, str]]  # media, each with the folder of its path, and where its row is from


def open_media(
    settings: ModelSettings, data: DataSettings, config: Any, meta_model: Any, tokenizer: Any
) -> "MediaInputs":
    """Open the processor of a vision-language model.

    Args:
        meta_model: the model on meta, whose code computes positions.

    Raises:
        UserError: the model does not accept images, or is of a family that is not supported with images; its processor,
            or what that needs, is not there; or it does not take ``min_pixels`` or ``max_pixels``.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        found = (
            f"images are not supported with {kind} yet"
            if config.get_text_config() is not config
            else "this model does not accept images"
        )
        raise UserError("images", f"given, but {found}", f"a model of {', '.join(FAMILIES)}")
    try:
        import PIL  # noqa: F401
        import transformers
        from transformers import AutoImageProcessor  # slow to import
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    except ImportError:
        raise UserError("images", "they need Pillow, which is not installed", fix=INSTALL) from None
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    options = hub_options(settings, is_checked=True)
    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    # A processor is also made for videos, which need torchvision, and of which none is read here.
    still: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _any_class})
    try:
        image_processor = AutoImageProcessor.from_pretrained(name, **options)
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        settings_of_processor, _ = still.get_processor_dict(name, **options)
        _check_bounds(image_processor, settings_of_processor)
        processor = still.from_args_and_dict(
            [parts.get(each) for each in still.get_attributes()], settings_of_processor
        )
    except UserError:
        raise
    except Exception as error:  # the files may hold anything
        fix = f"{INSTALL}, or copy the processor's files next to the weights"
        raise UserError("model_name_or_path", f"{name}: no image processor ({first_line(error)})", fix=fix) from None
    limits = {"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels}
    if any(limits.values()):
        setting = "min_pixels" if data.min_pixels else "max_pixels"
        # The sides of other processors are lengths. These are numbers of pixels.
        if not hasattr(image_processor, "merge_size"):
            raise UserError(setting, f"given, and {type(image_processor).__name__} has no such limit")
        size = dict(image_processor.size) | {edge: value for edge, value in limits.items() if value}
        if size["shortest_edge"] > size["longest_edge"]:
            raise UserError("max_pixels", f"{size['longest_edge']}, below min_pixels {size['shortest_edge']}")
        image_processor.size = size
    return MediaInputs(processor, config, meta_model)


def _check_bounds(of_images: Any, of_processor: dict[str, Any]) -> None:
    """Raise ``UserError`` if a setting of a processor could make an image fill the memory."""
    settings = {**of_processor, **of_images.to_dict()}
    for name, (least, most) in _BOUNDS.items():
        if name == "size" and hasattr(type(of_images), "merge_size"):
            most = MAX_PIXELS
        value = settings.get(name)
        numbers = np.array([*value.values()] if isinstance(value, dict) else value or least, np.float64)
        if not ((least <= numbers) & (numbers <= most)).all():
            found = f"its image processor has {name} {value}"
            raise UserError("model_name_or_path", found, f"{least} to {most:,}")


def _any_class(self: Any, name: str, argument: Any) -> None:
    """Replaces a check of transformers that imports what videos need."""


class MediaInputs:
    """See the module. It is ``kit.data.chat.tokens.MediaCodec`` too.

    Attributes:
        processor: of transformers, without its part for videos.
    """

    def __init__(self, processor: Any, config: Any, meta_model: Any) -> None:
        self.processor = processor
        self._tokenizer = processor.tokenizer
        self._decoder = getattr(meta_model, meta_model.base_model_prefix, None) or meta_model.model
        self._accepted = set(signature(type(self._decoder).forward).parameters)
        merged = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
        self._options = dict(merged["images_kwargs"])
        types = "return_mm_token_type_ids"  # before transformers 5.23 among the options of texts only
        self._has_types = bool(merged["text_kwargs"].get(types, merged.get(types)))
        # It counts the tokens of an image of any size. Merging its options for each took nine tenths of the time.
        self._counter = copy.copy(processor)
        self._counter._merge_kwargs = lambda **_: merged
        self.tokens: dict[MediaKind, str] = {"image": processor.image_token}
        self._placeholder_id: int = config.image_token_id
        self.placeholder_ids = frozenset([self._placeholder_id])
        self._placeholder = self._tokenizer.convert_ids_to_tokens(self._placeholder_id)
        self._texts: dict[tuple[int, int], str] = {}
        if self._placeholder is None or self.tokens["image"] is None:
            raise UserError("model_name_or_path", "its tokenizer has no image placeholder token")

    @cached_property
    def key(self) -> str:
        """See ``MediaCodec``."""
        settings = self.processor.image_processor.to_dict() | self._options
        own = {name: value for name, value in vars(self.processor).items() if isinstance(value, str | int | float)}
        return digest(
            {name: str(value) for name, value in sorted((settings | own).items())}, self._placeholder_id, _DIGESTS
        )

    @property
    def description(self) -> str:
        """A line for the user."""
        name = type(self.processor.image_processor).__name__
        text = self._of(*_SIZES[2])
        return (
            f"images: {name}; one of {_SIZES[2][1]} x {_SIZES[2][0]} pixels is {text.count(self._placeholder)} tokens"
        )

    def _of(self, height: int, width: int) -> str:
        """See ``MediaCodec``. Raises ``UserError`` if the processor takes no image of this size."""
        if (text := self._texts.get((height, width))) is not None:
            return text
        try:
            is_counted = self._counts_only
            text = (
                self.tokens["image"] * self._num_tokens(height, width) if is_counted else self._of_blank(height, width)
            )
        except Exception as error:  # the code of any family
            raise UserError("", f"{width} x {height} pixels: {first_line(error)}") from None
        if len(self._texts) < _MOST_SIZES:  # most sizes have the text of another one, which may have kilobytes
            text = self._texts[height, width] = sys.intern(text)
        return text

    def _of_blank(self, height: int, width: int) -> str:
        """The text of an image without content: its pixels are resized, and not computed with."""
        from PIL import Image as pil

        blank = pil.new("RGB", (width, height))
        return self._process([blank], do_rescale=False, do_normalize=False)[1][0]

    def _num_tokens(self, height: int, width: int) -> int:
        return int(self._counter._get_num_multimodal_tokens(image_sizes=[[height, width]])["num_image_tokens"][0])

    @cached_property
    def _counts_only(self) -> bool:
        """Whether the text of an image is its placeholders alone, whose number the processor knows without an image."""
        try:
            return all(self._of_blank(*size) == self.tokens["image"] * self._num_tokens(*size) for size in _SIZES)
        except Exception:  # the code of any family
            return False

    def texts(self, media: Sequence[Media]) -> list[str]:
        """See ``MediaCodec``."""
        return [self._of(*each.size) for each in media]

    def count(self, text: str) -> int:
        """See ``MediaCodec``."""
        return text.count(self._placeholder)

    def ids(self, text: str) -> frozenset[int]:
        """See ``MediaCodec``."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.content in text)

    def _process(self, pictures: list[Any], **options: Any) -> tuple[Any, list[str]]:
        """The inputs of the tower for pictures (``PIL.Image``), and the text of each."""
        layout = self.processor.prepare_inputs_layout(images=pictures)[0]
        processed, texts = self.processor._process_images(
            layout, **{**self._options, "return_tensors": "pt", **options}
        )
        return processed, texts

    def _tower_inputs(self, processed: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in processed.items() if name in self._accepted}

    @cached_property
    def _dummy(self) -> dict[str, torch.Tensor]:
        from PIL import Image as pil

        return self._tower_inputs(self._process([pil.new("RGB", (64, 64))])[0])

    def inputs(
        self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]], images: Sequence[OfSegment]
    ) -> dict[str, Any]:
        """Return the fields of a ``MicroBatch`` for its images.

        Args:
            input_ids: int64 [B, T].
            segments: of the ``MicroBatch``: of each the first position, and its tokens.
            images: of each segment.

        Raises:
            UserError: an image cannot be decoded, or is another one than when its header was read.
        """
        flat = [image for each in images for image in each]
        processed, texts = self._decoded(flat) if flat else (None, [])
        for (image, _, origin), text in zip(flat, texts, strict=True):
            if text != self._of(*image.size):
                height, width = image.size
                found = f"an image of {width} x {height} pixels has other placeholders than its header said"
                raise UserError(origin, found)
        tower = self._tower_inputs(processed) if flat else self._dummy
        counts = [len(each) for each in images]
        ids = torch.from_numpy(input_ids)
        return {
            "encoder_inputs": tower,
            "token_inputs": self._token_inputs(ids, segments, counts, tower),
            "num_media": len(flat),
        }

    def example(self, seed: int) -> tuple[list[int], Media]:
        """Return a picture of random colours, and the tokens that stand for it."""
        from PIL import Image as pil

        file = io.BytesIO()
        colours = np.random.default_rng(seed).integers(256, size=(64, 64, 3), dtype=np.uint8)
        pil.fromarray(colours).save(file, "PNG")
        image = inspect("image", file.getvalue(), "")
        encoded = self._tokenizer.backend_tokenizer.encode(*self.texts([image]), add_special_tokens=False)
        return encoded.ids, image

    def shown(self, text: str) -> str:
        """Return ``text`` with repeated placeholders shortened to one."""
        return re.sub(f"({re.escape(self._placeholder)}){{2,}}", self._placeholder, text)

    def _decoded(self, flat: OfSegment) -> tuple[Any, list[str]]:
        pictures = []
        for image, folder, origin in flat:
            try:
                pictures.append(decoded(image, folder))
            except UserError as error:
                raise UserError(*(Problem(origin, p.found, p.expected, p.fix) for p in error.problems)) from None
        return self._process(pictures)

    def _token_inputs(
        self,
        ids: torch.Tensor,
        segments: Sequence[tuple[int, int, int]],
        counts: Sequence[int],
        tower: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """What the decoder needs of each token: [B, T], or positions in three axes [4, B, T], the first of the text."""
        kinds = (ids == self._placeholder_id).long()
        inputs = {}
        if self._has_types and "token_type_ids" in self._accepted:
            inputs["token_type_ids"] = kinds
        if not hasattr(self._decoder, "get_rope_index"):
            return inputs
        length = ids.shape[1]
        flat_ids, flat_kinds = ids.flatten(), kinds.flatten()
        # Positions of padding continue those of the segments before it: nothing attends to it.
        positions = torch.arange(length).repeat(len(ids)).expand(4, -1).clone()  # [4, B * T]
        first = 0
        for (start, size, _), count in zip(segments, counts, strict=True):
            rows = slice(start, start + size)
            text = torch.arange(size)
            positions[:, rows] = text
            if count:
                grid = tower["image_grid_thw"][first : first + count]
                found, _ = self._decoder.get_rope_index(
                    flat_ids[None, rows], mm_token_type_ids=flat_kinds[None, rows], image_grid_thw=grid
                )
                positions[1:, rows] = found[:, 0]
            first += count
        return inputs | {"position_ids": positions.view(4, *ids.shape)}

    def generation_inputs(self, input_ids: torch.Tensor, images: Sequence[OfSegment]) -> dict[str, Any]:
        """Return the arguments of ``generate`` for prompts [B, T] and the images of each."""
        flat = [image for each in images for image in each]
        name = next((n for n in ("mm_token_type_ids", "token_type_ids") if n in self._accepted), "")
        kinds = (input_ids == self._placeholder_id).long()
        if not flat:
            return {"dummy_media": self._dummy} | ({name: kinds} if name == "token_type_ids" else {})
        return self._tower_inputs(self._decoded(flat)[0]) | ({name: kinds} if name else {})
