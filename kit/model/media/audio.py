"""Sounds as inputs of a model: placeholders by their length alone, and inputs of the encoder, by its own processor.

Promises:

- The text of a sound depends on its length alone. When its features are made, their text must be the same.
- A sound of which the processor would cut the end is refused.
- Every rank runs the encoder in every micro-batch: without a sound in it, on one that nothing hears.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch

from kit.config.settings.model import ModelSettings
from kit.data.chat.media_parts import as_wav
from kit.data.media import Media, MediaKind
from kit.data.read.audio_files import INSTALL, MAX_SECONDS, RATES, resampled, resampled_length
from kit.data.read.media_files import decoded, inspect
from kit.model.pretrained.locate import hub_options, locate_model
from kit.system.cache import digest
from kit.system.errors import Problem, UserError, first_line

_LEAST = 2  # placeholders: with a single one, the code of Qwen2-Audio takes the text for one that is not filled yet
_EXAMPLE_SECONDS = 0.4
# The least and the most of a number in the settings of a feature extractor, so that none fills the memory.
_BOUNDS = {
    "sampling_rate": RATES,
    **dict.fromkeys(("feature_size", "n_mels", "num_mel_bins"), (1, 1024)),
    **dict.fromkeys(("n_fft", "fft_length", "win_length", "frame_length"), (16, 1 << 14)),
    "hop_length": (16, 1 << 14),
    "chunk_length": (1, MAX_SECONDS),
}
# Models that write sounds, or read them as their text is written.
_REFUSED = re.compile(r"omni|realtime|kyutai|moshi")
OfSegment = Sequence[tuple[Media, str, str]]  # media, each with the folder of its path, and where its row is from


def open_audio(settings: ModelSettings, config: Any, decoder: Any, tokenizer: Any) -> "AudioInputs":
    """Open the part of a model's processor that reads sounds.

    Args:
        decoder: of the model on meta.

    Raises:
        UserError: the model does not accept audio, or its processor, or what that needs, is not there.
    """
    kind = config.model_type
    if "input_features" not in signature(type(decoder).forward).parameters or _REFUSED.search(kind):
        found = "given, but this model does not accept audio"
        raise UserError("audio", found, "a model that reads audio and text")
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
        import transformers
        from transformers import AutoFeatureExtractor, FeatureExtractionMixin
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    except (ImportError, OSError):  # OSError: without the library libsndfile
        found = "it needs soundfile and soxr, which are not installed"
        raise UserError("audio", found, fix=INSTALL) from None
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    options = hub_options(settings, is_checked=True)
    processor_class: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    try:
        _check_bounds(FeatureExtractionMixin.get_feature_extractor_dict(name, **options)[0])
        extractor = AutoFeatureExtractor.from_pretrained(name, **options)
        parts = {"feature_extractor": extractor, "audio_processor": extractor, "tokenizer": tokenizer}
        # Also of a model that reads images, whose processor may need what is not installed.
        heard: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _any_class})
        own, _ = heard.get_processor_dict(name, **options)
        processor = heard.from_args_and_dict([parts.get(each) for each in heard.get_attributes()], own)
        return AudioInputs(processor, decoder)
    except UserError:
        raise
    except Exception as error:  # the files may hold anything
        fix = "copy the processor's files next to the weights, and install what it names"
        raise UserError("model_name_or_path", f"{name}: no audio processor ({first_line(error)})", fix=fix) from None


def _check_bounds(settings: dict[str, Any]) -> None:
    """Raise ``UserError`` if a setting of a feature extractor could fill the memory."""
    for name, (least, most) in _BOUNDS.items():
        value = settings.get(name, least)
        if not isinstance(value, int | float) or not least <= value <= most:
            raise UserError("model_name_or_path", f"its audio processor has {name} {value!r}", f"{least} to {most}")


def _any_class(self: Any, name: str, argument: Any) -> None:
    """Replaces a check of transformers that refuses a part which is not there."""


class AudioInputs:
    """See the module. It is ``kit.data.chat.tokens.MediaCodec`` for audio.

    Attributes:
        rate: of the samples that the processor takes, in Hz.
    """

    def __init__(self, processor: Any, decoder: Any) -> None:
        """``decoder``: of the model on meta. It counts the features of a sound if the processor does not."""
        self.processor = processor
        self._tokenizer = processor.tokenizer
        self._extractor = processor._audio_processor
        self._decoder = decoder
        self._accepted = set(signature(type(decoder).forward).parameters)
        self.rate = int(self._extractor.sampling_rate)
        self._token: str = processor.audio_token
        self.tokens: dict[MediaKind, str] = {"audio": self._token}
        self._placeholder_id: int = self._tokenizer.convert_tokens_to_ids(self._token)
        self.placeholder_ids = frozenset([self._placeholder_id])
        merged = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
        self._options = dict(merged["audio_kwargs"]) | {"return_tensors": "pt"}
        self._takes = signature(type(self._extractor).__call__).parameters
        if "sampling_rate" in self._takes:
            self._options["sampling_rate"] = self.rate  # it would warn without
        # Texts by the number of samples, in its order. More samples have no fewer placeholders, so between two with
        # the same text all have it.
        self._lengths: list[int] = []
        self._texts: list[str] = []

    @cached_property
    def key(self) -> str:
        """See ``MediaCodec``."""
        settings = self._extractor.to_dict() | self._options
        own = {name: value for name, value in vars(self.processor).items() if isinstance(value, str | int | float)}
        return digest({name: str(value) for name, value in sorted((settings | own).items())}, self._placeholder_id)

    @property
    def description(self) -> str:
        """A line for the user."""
        text = self._of((self.rate, self.rate))
        return f"audio: {type(self._extractor).__name__}; a second is {text.count(self._token)} tokens"

    def texts(self, media: Sequence[Media], around: Sequence[str] = ()) -> list[str]:
        """See ``MediaCodec``. Nothing around a sound matters."""
        return [self._of(each.size) for each in media]

    def count(self, text: str) -> int:
        """See ``MediaCodec``."""
        return text.count(self._token)

    def ids(self, text: str) -> frozenset[int]:
        """See ``MediaCodec``."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.content in text)

    def shown(self, text: str) -> str:
        """Return ``text`` with repeated placeholders shortened to one."""
        return re.sub(f"({re.escape(self._token)}){{2,}}", self._token, text)

    def example(self, seed: int, width: int = 1) -> tuple[list[int], Media]:
        """Return a sound of noise, whose length depends on ``seed``, and the tokens that stand for it."""
        media = inspect(
            "audio",
            as_wav(self._noise(seed, int((_EXAMPLE_SECONDS + 0.2 * (seed % 3)) * self.rate)).tolist(), self.rate),
            "",
        )
        (text,) = self.texts([media])
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, media

    def inputs(
        self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]], media: Sequence[OfSegment]
    ) -> dict[str, Any]:
        """Return the fields of a ``MicroBatch`` for its sounds.

        Args:
            input_ids: int64 [B, T].
            segments: of the ``MicroBatch``: of each the first position, and its tokens.
            media: of each segment.

        Raises:
            UserError: a sound cannot be decoded, or is another one than when its header was read.
        """
        flat = [each for of_segment in media for each in of_segment]
        encoder = self._encoder_inputs(self._decoded(flat)) if flat else self._dummy
        of_tokens = self._token_inputs(torch.from_numpy(input_ids))
        return {"encoder_inputs": encoder, "token_inputs": of_tokens, "num_media": len(flat)}

    def generation_inputs(self, input_ids: torch.Tensor, media: Sequence[OfSegment]) -> dict[str, Any]:
        """Return the arguments of ``generate`` for prompts [B, T] and the sounds of each."""
        flat = [each for of_segment in media for each in of_segment]
        if not flat:
            return {"dummy_media": self._dummy}
        return self._encoder_inputs(self._decoded(flat)) | self._token_inputs(input_ids)

    def _of(self, size: tuple[int, int]) -> str:
        """What stands for a sound, given its number of samples and their rate.

        Raises ``UserError`` if the processor would cut the sound, or makes too little of it.
        """
        num = resampled_length(*size, self.rate)
        at = bisect_left(self._lengths, num)
        around = self._texts[max(0, at - 1) : at + 1]
        if (at < len(self._lengths) and self._lengths[at] == num) or (len(around) == 2 and around[0] == around[1]):
            return self._texts[at]
        text = self._asked(num)
        self._lengths.insert(at, num)
        self._texts.insert(at, text)
        return text

    def _asked(self, num: int) -> str:
        """The text of ``num`` samples, from the processor."""
        noise = self._noise(0, num)
        seconds = f"{num / self.rate:.5g} seconds"
        try:
            processed, (text,) = self._process([noise])
            whole = self._process([noise], truncation=False)[0] if "truncation" in self._takes else processed
        except Exception as error:  # the code of any family
            raise UserError("", f"{seconds}: {first_line(error)}") from None
        if any(not torch.equal(each, whole[name]) for name, each in processed.items() if torch.is_tensor(each)):
            raise UserError("", f"{seconds}, whose end the model's processor cuts off", "a shorter sound")
        if text.count(self._token) < _LEAST:
            raise UserError("", f"{seconds}, too few for the model's processor", "a longer sound")
        return text

    def _noise(self, seed: int, num: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(scale=0.1, size=num).astype(np.float32)

    def _decoded(self, flat: OfSegment) -> Any:
        """What the processor makes of sounds."""
        sounds = []
        for media, folder, origin in flat:
            try:
                sounds.append(resampled(decoded(media, folder), self.rate))
            except UserError as error:
                raise UserError(*(Problem(origin, p.found, p.expected, p.fix) for p in error.problems)) from None
        processed, texts = self._process(sounds)
        for (media, _, origin), sound, text in zip(flat, sounds, texts, strict=True):
            if text != self._of(media.size):
                found = f"a sound of {len(sound)} samples has other placeholders than its length said"
                raise UserError(origin, found)
        return processed

    def _process(self, sounds: list[np.ndarray], **options: Any) -> tuple[Any, list[str]]:
        """What the processor makes of samples at its rate, and the text of each sound."""
        options = self._options | options
        if hasattr(self.processor, "_retrieve_input_features"):  # Voxtral's text comes from another library
            most = options.pop("max_source_positions")
            each = [self.processor._retrieve_input_features([sound], most, **options) for sound in sounds]
            return {"input_features": torch.cat(each)}, [self._token * self._num_features(part) for part in each]
        layout = self.processor.prepare_inputs_layout(audio=sounds)[-1]
        processed, texts = self.processor._process_audio(layout, **options)
        return processed, texts

    def _num_features(self, inputs: torch.Tensor) -> int:
        return len(self._decoder.get_audio_features(inputs.to("meta"), return_dict=True).pooler_output)

    def _encoder_inputs(self, processed: Any) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(value) for name, value in processed.items() if name in self._accepted}

    def _token_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The kind of each token, [B, T], for a decoder that asks for it: 3 for audio."""
        kinds = 3 * (ids == self._placeholder_id).long()
        return {"mm_token_type_ids": kinds} if "mm_token_type_ids" in self._accepted else {}

    @cached_property
    def _dummy(self) -> dict[str, torch.Tensor]:
        inputs = self._encoder_inputs(self._process([self._noise(0, int(_EXAMPLE_SECONDS * self.rate))])[0])
        if (features := getattr(self._decoder, "get_audio_features", None)) is None:
            return {"input_features": inputs["input_features"]}
        return {name: value for name, value in inputs.items() if name in signature(features).parameters}
