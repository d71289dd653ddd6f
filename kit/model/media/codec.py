"""Inputs of vision-language models: image placeholders in the text, inputs of the vision tower, and positions.

All of it comes from the model's own processor and code, whatever its family: the processor is called with a tokenizer
that keeps the text which it would encode, and that gives it the ids of the rows. ``kit.train.checks.media_proof``
proves on the model that is trained that its losses and gradients are those of its own forward.

Promises:

- The text of an image is known before any pixel is read: it depends on the size, and in some families on the other
  images of its row and on what stands beside it. When its pixels are made, their text must be the same: so there are as
  many placeholders as features.
- Every rank runs the tower in every micro-batch: without an image in it, on one that nothing looks at.
"""

import copy
import io
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

from kit.config.settings.data import DataSettings
from kit.config.settings.model import ModelSettings
from kit.data.media import Media, MediaKind
from kit.data.read.image_files import INSTALL, MAX_PIXELS
from kit.data.read.media_files import decoded, inspect
from kit.model.pretrained.locate import hub_options, locate_model
from kit.system.cache import digest
from kit.system.errors import Problem, UserError, first_line

_MARK = "\ufddf"  # a noncharacter, which no text holds
_SIZES = ((64, 64), (40, 300), (1200, 900))  # in which it is seen whether the text is made of placeholders alone
_DIGESTS = 3  # the version of ``Media.digest``, which cache entries hold
_MOST_SIZES = 1 << 16  # whose texts are kept
# The least and the most that a number in a setting of a processor may be. Of Qwen, ``size`` is in pixels.
_BOUNDS = {
    **dict.fromkeys(("size", "crop_size", "pad_size", "image_grid_pinpoints"), (32, 2048)),
    "max_image_size": (32, 4096),
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
        UserError: the model does not accept images, or not in its text; its processor, or what that needs, is not
            there; or it does not take ``min_pixels`` or ``max_pixels``.
    """
    if _reader(meta_model) is None:
        raise UserError("images", "given, but this model does not accept images", "a model that reads images and text")
    try:
        import PIL  # noqa: F401
        import transformers
        from transformers import AutoImageProcessor, ProcessorMixin  # slow to import
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    except ImportError:
        raise UserError("images", "they need Pillow, which is not installed", fix=INSTALL) from None
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    options = hub_options(settings, is_checked=True)
    try:
        image_processor = AutoImageProcessor.from_pretrained(name, **options)
        # The part for videos is asked for settings that it shares with the one for images, at most.
        parts = {"image_processor": image_processor, "video_processor": image_processor, "tokenizer": tokenizer}
        settings_of_processor, _ = ProcessorMixin.get_processor_dict(name, **options)
        of_images, _ = image_processor.get_image_processor_dict(name, **options)
        settings_of_all = (settings_of_processor, of_images, tokenizer.init_kwargs)
        named = next(filter(None, (each.get("processor_class") for each in settings_of_all)), None)
        processor_class = getattr(transformers, named or PROCESSOR_MAPPING_NAMES[config.model_type])
        # A processor is also made for videos, which need torchvision, and of which none is read here.
        still: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _any_class})
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
        if name == "max_patches" and isinstance(
            settings.get("patch_size"), int
        ):  # they are no tiles, but the patches of the encoder
            most = MAX_PIXELS // settings["patch_size"] ** 2
        value = settings.get(name)
        if isinstance(value, dict) and any("pixels" in key for key in value):
            most = MAX_PIXELS
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
        self._reader = _reader(meta_model)
        self._of_encoder = _parameters(getattr(self._reader, "get_image_features", lambda: None))
        # What the model takes beside its decoder, the loss head gives to its own forward.
        of_whole = _parameters(type(meta_model).forward) & self._of_encoder
        self._accepted = _parameters(type(self._reader).forward) | of_whole
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        self._num_axes = 1 + len(rope.get("mrope_section", (1, 1, 1)))
        merged = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
        self._options = dict(merged["images_kwargs"])
        # It counts the tokens of an image of any size. Merging its options for each took nine tenths of the time.
        self._counter = copy.copy(processor)
        self._counter._merge_kwargs = lambda **_: merged
        self._texts: dict[Any, list[str]] = {}
        name, expected = type(meta_model).__name__, "a model whose text has a token for each feature of an image"
        found, most = f"no tokens stand for one in the text of {name}", []
        # Of what stands for an image in a text, some processors have a name beside that of its placeholder.
        for each in ("image_token", "image_placeholder_token"):
            if (token := getattr(processor, each, None)) is None:
                continue
            self.tokens: dict[MediaKind, str] = {"image": token}
            try:
                ids = Counter(self._encoded(*self._of_blanks([_SIZES[2]])))
            except Exception as error:  # the code of any family
                found = f"{type(processor).__name__} fails on one: {first_line(error)}"
                continue
            most = Counter({i: ids[i] for i in ids.keys() & self._tokenizer.added_tokens_decoder}).most_common(1)
            if most and most[0][1] == 1:  # max_pixels may leave one token to an image
                most = [(i, 1) for i in (getattr(config, "image_token_id", None),) if i in ids]
            break
        if not most:
            raise UserError("images", f"given, but {found}", expected)
        self._placeholder_id: int = most[0][0]
        self.placeholder_ids = frozenset([self._placeholder_id])
        self._placeholder = self._tokenizer.convert_ids_to_tokens(self._placeholder_id)

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
        (text,) = self._of([_SIZES[2]])
        return (
            f"images: {name}; one of {_SIZES[2][1]} x {_SIZES[2][0]} pixels is {text.count(self._placeholder)} tokens"
        )

    def texts(self, media: Sequence[Media], around: Sequence[str] = ()) -> list[str]:
        """See ``MediaCodec``."""
        sizes = [each.size for each in media]
        if not self._depends_on_row:
            return [text for size in sizes for text in self._of([size])]
        return self._of(sizes, tuple(f"{each[:1]}{each[-1:]}" for each in around)) if media else []

    def count(self, text: str) -> int:
        """See ``MediaCodec``."""
        return text.count(self._placeholder)

    def ids(self, text: str) -> frozenset[int]:
        """See ``MediaCodec``."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.content in text)

    def example(self, seed: int, width: int = 1) -> tuple[list[int], Media]:
        """See ``MediaCodec``."""
        from PIL import Image as pil

        file = io.BytesIO()
        colours = np.random.default_rng(seed).integers(256, size=(64, 64 * width, 3), dtype=np.uint8)
        pil.fromarray(colours).save(file, "PNG")
        image = inspect("image", file.getvalue(), "")
        return self._encoded(*self.texts([image])), image

    def shown(self, text: str) -> str:
        """Return ``text`` with repeated placeholders shortened to one."""
        return re.sub(f"({re.escape(self._placeholder)}){{2,}}", self._placeholder, text)

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
        at = [slice(start, start + size) for start, size, _ in segments]
        rows = [input_ids.ravel()[each] for each in at]
        tower, of_rows = self._of_rows(rows, images)
        given = {name: values for name, values in of_rows.items() if name in self._accepted}
        if hasattr(self._reader, "get_rope_index"):
            given["position_ids"] = self._positions(rows, images, of_rows, tower)
        token_inputs = {}
        for name, values in given.items():
            filled = torch.zeros(input_ids.size, dtype=torch.int64)
            if name == "position_ids":  # those of padding continue those before it: nothing attends to it
                filled = torch.arange(input_ids.shape[1]).repeat(len(input_ids)).repeat(self._num_axes, 1)
            for where, value in zip(at, values, strict=True):
                filled[..., where] = value
            token_inputs[name] = filled.unflatten(-1, input_ids.shape)
        num_media = sum(map(len, images))
        return {
            "encoder_inputs": tower if num_media else self._dummy,
            "token_inputs": token_inputs,
            "num_media": num_media,
        }

    def generation_inputs(self, input_ids: torch.Tensor, images: Sequence[OfSegment]) -> dict[str, Any]:
        """Return the arguments of ``generate`` for prompts [B, T] and the images of each."""
        tower, of_rows = self._of_rows(list(input_ids.numpy()), images)
        given = {name: torch.stack(values) for name, values in of_rows.items() if name in self._accepted}
        if any(images):
            return tower | given
        # Without an image, these would make it look for one.
        return {"dummy_media": self._dummy} | {name: given[name] for name in given.keys() - {"mm_token_type_ids"}}

    def own_inputs(self, text: str, media: Sequence[Media]) -> dict[str, Any]:
        """See ``MediaCodec``."""
        if not media:  # some processors take no text alone
            ids = torch.tensor([self._encoded(text)])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        pictures = [decoded(each, "") for each in media]
        given: Any = [pictures] if self._takes_rows else pictures
        return _in_float32(self.processor(images=given, text=[text], return_tensors="pt", add_special_tokens=False))

    def _of_rows(
        self, rows: Sequence[np.ndarray], images: Sequence[OfSegment]
    ) -> tuple[dict[str, torch.Tensor], dict[str, list[torch.Tensor]]]:
        """The inputs of the encoder for rows of tokens with images; and by name what is known of each row's tokens."""
        of_rows = {name: [torch.zeros(len(row), dtype=torch.int64) for row in rows] for name in self._per_token}
        with_images = [k for k, each in enumerate(images) if each]
        if not with_images:
            return {}, of_rows
        # They are as one row, unless it matters which others a row has.
        groups = [[k] for k in with_images] if self._depends_on_row else [with_images]
        pictures = [[picture for k in group for picture in _decoded(images[k])] for group in groups]
        ids = _padded([np.concatenate([rows[k] for k in group]) for group in groups])
        processed, texts = self._process(pictures, [("a",) * (len(each) + 1) for each in pictures], ids.tolist())
        found = iter(texts)
        for of_row in filter(None, images):
            expected = self.texts([image for image, _, _ in of_row])
            for (image, _, origin), text in zip(of_row, expected, strict=True):
                if text != next(found):
                    height, width = image.size
                    problem = f"an image of {width} x {height} pixels has other placeholders than its header said"
                    raise UserError(origin, problem)
        for name, values in of_rows.items():
            for group, value in zip(groups, processed[name], strict=True):
                ends = np.cumsum([len(rows[k]) for k in group]).tolist()
                for k, end in zip(group, ends, strict=True):
                    values[k] = value[end - len(rows[k]) : end].long()
        return self._encoder_inputs(processed), of_rows

    def _positions(
        self,
        rows: Sequence[np.ndarray],
        images: Sequence[OfSegment],
        of_rows: dict[str, list[torch.Tensor]],
        tower: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Positions of each row, [axes, T]: the first axis is that of the text, usually of four."""
        positions = [torch.arange(len(row)).expand(self._num_axes, -1) for row in rows]
        chosen = [k for k, each in enumerate(images) if each]
        if not chosen:
            return positions
        given = {name: pad_sequence([values[k] for k in chosen], True) for name, values in of_rows.items()}
        given["input_ids"] = torch.from_numpy(_padded([rows[k] for k in chosen]))
        given["attention_mask"] = pad_sequence([torch.ones(len(rows[k]), dtype=torch.int64) for k in chosen], True)
        index = self._reader.get_rope_index
        found, _ = index(**{name: value for name, value in (given | tower).items() if name in _parameters(index)})
        for k, of_row in zip(chosen, found.unbind(1), strict=True):  # [axes - 1, T]
            positions[k] = torch.cat([positions[k][:1], of_row[:, : len(rows[k])]])
        return positions

    def _encoder_inputs(self, processed: dict[str, Any]) -> dict[str, torch.Tensor]:
        names = self._accepted - {"input_ids", "attention_mask", *self._per_token}
        return _in_float32({name: value for name, value in processed.items() if name in names})

    @cached_property
    def _dummy(self) -> dict[str, torch.Tensor]:
        inputs = self._encoder_inputs(self._process([_blanks([_SIZES[0]])], ["aa"])[0])
        return {name: value for name, value in inputs.items() if name in self._of_encoder}

    @cached_property
    def _per_token(self) -> list[str]:
        """The names of what the processor computes of each token."""
        ids = self._encoded(*self._of([_SIZES[0]]))
        shorter, longer = (self._process([_blanks([_SIZES[0]])], ["aa"], [[*ids, *more]])[0] for more in ([], [0]))
        names = [name for name, value in shorter.items() if np.shape(value) != np.shape(longer[name])]
        return [name for name in names if name not in ("input_ids", "attention_mask")]

    @cached_property
    def _takes_rows(self) -> bool:
        """Whether the processor takes a list of images for each text."""
        try:
            self.processor(images=[_blanks([_SIZES[0]])], text=[self.tokens["image"]], return_tensors="pt")
        except Exception:  # the code of any family
            return False
        return True

    @cached_property
    def _depends_on_row(self) -> bool:
        """Whether the text of an image is another one beside other images, or in another text."""
        alone = [self._of_blanks([size])[0] for size in _SIZES]
        try:
            others = [self._of_blanks(_SIZES[:1], (each, each))[0] for each in (" ", "\n", "<")]
            adjacent = self._of_blanks(_SIZES, ("a", "", "", "a"))
            return self._of_blanks(_SIZES) != alone or {*others} != {alone[0]} or "".join(adjacent) != "".join(alone)
        except Exception:  # of several images; then it is asked again for a row that has some
            return True

    @cached_property
    def _counts_only(self) -> bool:
        """Whether the text of an image is its placeholders alone, whose number the processor knows without an image."""
        if self._depends_on_row:
            return False
        try:
            return all(self._of_blanks([size])[0] == self.tokens["image"] * self._num_tokens(*size) for size in _SIZES)
        except Exception:  # the code of any family
            return False

    def _num_tokens(self, height: int, width: int) -> int:
        return int(self._counter._get_num_multimodal_tokens(image_sizes=[[height, width]])["num_image_tokens"][0])

    def _of(self, sizes: Sequence[tuple[int, int]], around: Sequence[str] = ()) -> list[str]:
        """The text of each image of a row. Raises ``UserError`` if the processor takes none of these sizes."""
        key = (*sizes, around)
        if (texts := self._texts.get(key)) is not None:
            return texts
        try:
            if self._counts_only:
                texts = [self.tokens["image"] * self._num_tokens(*size) for size in sizes]
            else:
                texts = self._of_blanks(sizes, around)
        except Exception as error:  # the code of any family
            height, width = sizes[0]
            raise UserError("", f"{width} x {height} pixels: {first_line(error)}") from None
        if len(self._texts) < _MOST_SIZES:  # most sizes have the text of another one, which may have kilobytes
            self._texts[key] = texts = list(map(sys.intern, texts))
        return texts

    def _of_blanks(self, sizes: Sequence[tuple[int, int]], around: Sequence[str] = ()) -> list[str]:
        """The texts of images without content: their pixels are resized, and not computed with."""
        around = around or ("a",) * (len(sizes) + 1)
        return self._process([_blanks(sizes)], [around], images_kwargs={"do_rescale": False, "do_normalize": False})[1]

    def _process(
        self,
        pictures: list[list[Any]],
        around: Sequence[Sequence[str]],
        ids: list[list[int]] | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], list[str]]:
        """What the processor makes of rows of pictures (``PIL.Image``), as tensors; and the text of each picture.

        Args:
            around: of each row the texts before, between and after its pictures.
            ids: the tokens of each row, [B, T], in place of those of such a text.

        Raises whatever the code of the family raises.
        """
        processor = copy.copy(self.processor)
        processor.tokenizer = tokenizer = _Recorder(self._tokenizer, ids)
        processor._check_special_mm_tokens = lambda *_, **__: None  # the text and the ids are not of each other
        images = pictures if self._takes_rows else list(chain.from_iterable(pictures))
        texts = [_marked(each, self.tokens["image"]) for each in around]
        processed = processor(images=images, text=texts, return_tensors="pt", **options)
        found = [_unmarked(text, each) for text, each in zip(tokenizer.texts, around, strict=True)]
        return dict(processed), list(chain.from_iterable(found))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


class _Recorder:
    """A tokenizer that keeps the texts it is called with, and may return other ids than theirs."""

    def __init__(self, tokenizer: Any, ids: list[list[int]] | None) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *_: Any, **__: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        found = self._tokenizer.backend_tokenizer.encode_batch(self.texts, add_special_tokens=False)
        ids = self._ids or [each.ids for each in found]
        return BatchEncoding({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}, found)


def _marked(around: Sequence[str], token: str) -> str:
    """The text of a row, with ``token`` for each image. Of the texts around them it has the ends, and a mark between.

    Nothing is between images that stand together.
    """
    last = len(around) - 1
    pieces = (f"{each[:1]}{_MARK}{each[-1:]}" if each or i in (0, last) else "" for i, each in enumerate(around))
    return token.join(pieces)


def _unmarked(text: str, around: Sequence[str]) -> list[str]:
    """What stands for each image in what a processor has made of ``_marked``. The first of several together has all.

    Raises ``ValueError`` if it changed the text around them.
    """
    last = len(around) - 1
    places = [i for i, each in enumerate(around) if each or i in (0, last)]
    first, *chunks = text.split(_MARK)
    texts: list[str] = []
    for before, after, chunk in zip(places, places[1:], chunks, strict=False):
        start, end = around[before][-1:], around[after][:1]
        if not (chunk.startswith(start) and chunk.endswith(end)):
            break
        texts += [chunk[len(start) : len(chunk) - len(end)], *[""] * (after - before - 1)]
    if len(texts) != last or len(chunks) != len(places) or first != around[0][:1] or chunks[-1] != around[-1][-1:]:
        raise ValueError("it changes the text around an image")
    return texts


def _blanks(sizes: Sequence[tuple[int, int]]) -> list[Any]:
    from PIL import Image as pil

    return [pil.new("RGB", (width, height)) for height, width in sizes]


def _in_float32(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of floats in the dtype that all processors but Llama 4's give them."""
    return {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}


def _decoded(images: OfSegment) -> list[Any]:
    pictures = []
    for image, folder, origin in images:
        try:
            pictures.append(decoded(image, folder))
        except UserError as error:
            raise UserError(*(Problem(origin, p.found, p.expected, p.fix) for p in error.problems)) from None
    return pictures


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of tokens, padded on the right with zeros: int64 [B, T]."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded


def _reader(model: Any) -> Any:
    """The part of a model that takes images: its decoder, or all of it; None if none does."""
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    for part in filter(None, (decoder, model)):
        names = _parameters(type(part).forward)
        if hasattr(part, "get_image_features") or any("pixel_values" in name for name in names):
            return part
    return None


def _parameters(function: Any) -> set[str]:
    return set(signature(function).parameters)
