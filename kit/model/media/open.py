"""Opens what a model's processor has for images and audio, as one codec."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from kit.config.settings.data import DataSettings
from kit.config.settings.model import ModelSettings
from kit.data.media import Media, MediaKind
from kit.model.media.audio import AudioInputs, open_audio
from kit.model.media.codec import MediaInputs, OfSegment
from kit.model.media.codec import open_media as open_images
from kit.system.errors import Problem, UserError


def open_media(
    settings: ModelSettings, data: DataSettings, config: Any, meta_model: Any, tokenizer: Any
) -> "ModelMedia":
    """Open the processor of a model for each kind of media that it reads.

    Args:
        meta_model: the model on meta, whose code computes positions.

    Raises:
        UserError: the model reads none, its processor or what that needs is not there, or it does not take a setting.
    """
    decoder = getattr(meta_model, meta_model.base_model_prefix, None) or getattr(meta_model, "model", meta_model)
    codecs: dict[MediaKind, Any] = {}
    problems: dict[MediaKind, Problem] = {}
    for kind in ("image", "audio"):
        try:
            codecs[kind] = (
                open_images(settings, data, config, meta_model, tokenizer)
                if kind == "image"
                else open_audio(settings, config, decoder, tokenizer)
            )
        except UserError as error:
            problems[kind] = error.problems[0]
            if problems[kind].where in ("min_pixels", "max_pixels"):
                raise
    if not codecs:
        raise UserError(problems["image" if problems["audio"].where == "audio" else "audio"])
    return ModelMedia(codecs, problems)


class ModelMedia:
    """The codecs of a model's media as one; it is ``kit.data.chat.tokens.MediaCodec``.

    Attributes:
        codecs: of each kind that the model reads.
        problems: of each other kind, the problem of a row that has it.
    """

    def __init__(self, codecs: dict[MediaKind, MediaInputs | AudioInputs], problems: dict[MediaKind, Problem]) -> None:
        self.codecs, self.problems = codecs, problems
        each = codecs.values()
        self.tokens: dict[MediaKind, str] = {kind: codec.tokens[kind] for kind, codec in codecs.items()}
        self.placeholder_ids = frozenset(chain.from_iterable(codec.placeholder_ids for codec in each))
        self.key = " ".join(codec.key for codec in each)
        self.processor = next(iter(each)).processor
        self.added_ids = frozenset(self.processor.tokenizer.added_tokens_decoder)

    def only(self, kinds: set[MediaKind]) -> "ModelMedia":
        """See ``MediaCodec``."""
        return ModelMedia({kind: codec for kind, codec in self.codecs.items() if kind in kinds}, self.problems)

    def __or__(self, other: "ModelMedia") -> "ModelMedia":
        return ModelMedia(self.codecs | other.codecs, self.problems)

    @property
    def description(self) -> str:
        """A line for the user."""
        return "; ".join(codec.description for codec in self.codecs.values())

    def texts(self, media: Sequence[Media], around: Sequence[str] = ()) -> list[str]:
        """See ``MediaCodec``. What is around them matters to none that reads two kinds."""
        if len({each.kind for each in media}) == 1:
            return self.codecs[media[0].kind].texts(media, around)
        of_kinds = {
            kind: iter(codec.texts([m for m in media if m.kind == kind])) for kind, codec in self.codecs.items()
        }
        return [next(of_kinds[each.kind]) for each in media]

    def count(self, text: str) -> int:
        """See ``MediaCodec``."""
        return sum(codec.count(text) for codec in self.codecs.values())

    def ids(self, text: str) -> frozenset[int]:
        """See ``MediaCodec``."""
        return next(iter(self.codecs.values())).ids(text)

    def example(self, seed: int, width: int = 1) -> tuple[list[int], Media]:
        """See ``MediaCodec``: of each kind in turn."""
        return [*self.codecs.values()][seed % len(self.codecs)].example(seed, width)

    def own_inputs(self, text: str, media: Sequence[Media]) -> dict[str, Any]:
        """See ``MediaCodec``."""
        images = self.codecs["image"]
        assert isinstance(images, MediaInputs)
        return images.own_inputs(text, media)

    def shown(self, text: str) -> str:
        """See ``MediaCodec``."""
        for codec in self.codecs.values():
            text = codec.shown(text)
        return text

    def inputs(
        self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]], media: Sequence[OfSegment]
    ) -> dict[str, Any]:
        """Return the fields of a ``MicroBatch`` for its media.

        Args:
            input_ids: int64 [B, T].
            segments: of the ``MicroBatch``: of each the first position, and its tokens.
            media: of each segment.

        Raises:
            UserError: one cannot be decoded, or is another one than when its header was read.
        """
        made: dict[str, dict[str, torch.Tensor]] = {"encoder_inputs": {}, "dummy_inputs": {}, "token_inputs": {}}
        for kind, codec in self.codecs.items():
            found = codec.inputs(input_ids, segments, _of_kind(media, kind))
            made["encoder_inputs" if found["num_media"] else "dummy_inputs"] |= found["encoder_inputs"]
            _add(made["token_inputs"], found["token_inputs"])
        return made

    def generation_inputs(self, input_ids: torch.Tensor, media: Sequence[OfSegment]) -> dict[str, Any]:
        """Return the arguments of ``generate`` for prompts [B, T] and the media of each."""
        inputs: dict[str, Any] = {}
        for kind, codec in self.codecs.items():
            found = codec.generation_inputs(input_ids, _of_kind(media, kind))
            if dummy := found.pop("dummy_media", None):
                inputs["dummy_media"] = inputs.get("dummy_media", {}) | dummy
            _add(inputs, found)
        return inputs


def _of_kind(media: Sequence[OfSegment], kind: MediaKind) -> list[OfSegment]:
    return [[each for each in of_segment if each[0].kind == kind] for of_segment in media]


def _add(inputs: dict[str, Any], more: dict[str, Any]) -> None:
    """Add ``more``. Kinds of tokens are 0 but where one codec has placeholders."""
    for name, value in more.items():
        inputs[name] = torch.maximum(inputs[name], value) if name in inputs else value
