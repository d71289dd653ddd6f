"""Inputs of models that read images or audio: placeholders in the text, inputs of the encoders, and positions.

All of it comes from the model's own processor and code, whatever its family: the processor is called with a tokenizer
that keeps the text which it would encode, and that gives it the ids of the rows. ``kit.train.checks.media_proof``
proves on the model that is trained that its losses and gradients are those of its own forward.

Promises:

- The text of an image or a sound is known before it is decoded: it depends on the size, and in some families on the
  others of its row and on what stands beside it. A file that changed since is refused when its features are made.
- A sound whose end the processor would cut off is refused.
- Every rank runs the encoders in every micro-batch: one for which it has nothing, on something that nothing looks at.
"""

import copy
import re
import sys
from bisect import bisect_left, insort
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

from kit.data.media import Media, MediaKind
from kit.data.read.media_files import inspect
from kit.model.media.kinds import Images, Sounds
from kit.system.cache import digest
from kit.system.errors import Problem, UserError, first_line

_MARK = "\ufddf"  # a noncharacter, which no text holds
_DIGESTS = 4  # the version of ``Media.digest``, which cache entries hold
_MOST_SIZES = 1 << 16  # whose texts are kept
Size = tuple[MediaKind, tuple[int, int]]  # of an image or a sound, as ``Media.size``
OfSegment = Sequence[tuple[Media, str, str]]  # media, each with the folder of its path, and where its row is from


class ModelMedia:
    """See the module. It is ``kit.data.chat.tokens.MediaCodec``.

    Attributes:
        processor: of transformers, without its part for videos.
        tokens: what stands for media in a text before the processor was called.
        problems: of each kind that the model does not read, the problem of a row that has it.
    """

    def __init__(
        self,
        processor: Any,
        config: Any,
        meta_model: Any,
        kinds: Mapping[MediaKind, Images | Sounds],
        problems: dict[MediaKind, Problem],
    ) -> None:
        """Raises ``UserError`` if nothing stands for media in the text."""
        self.processor, self.problems = processor, problems
        self._tokenizer = processor.tokenizer
        self.added_ids = frozenset(self._tokenizer.added_tokens_decoder)
        self._reader = part_that_reads(meta_model)
        self._of_encoder = {
            kind: _parameters(getattr(self._reader, f"get_{kind}_features", None)) or {"input_features"}
            for kind in kinds
        }
        # What the model takes beside its decoder, the loss head gives to its own forward.
        of_whole = _parameters(type(meta_model).forward) & set().union(*self._of_encoder.values())
        self._accepted = _parameters(type(self._reader).forward) | of_whole
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        self._num_axes = 1 + len(rope.get("mrope_section", (1, 1, 1)))
        self._texts: dict[Any, list[str]] = {}
        self._lengths: list[tuple[float, str]] = []  # of sounds in seconds, each with its text
        self._kinds, self._tokens = dict(kinds), dict[MediaKind, str]()
        placeholders: dict[str, int] = {}
        for kind, of_kind in kinds.items():
            try:
                # Of what stands for an image in a text, some processors have a name beside that of its placeholder.
                token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token")
                self._tokens[kind] = token
                ids = self._encoded(*self._of_blanks([(kind, of_kind.sizes[2])]))
                [(i, number)] = Counter(i for i in ids if i in self.added_ids).most_common(1)
                if number == 1:  # max_pixels may leave one token to an image
                    i = ids[ids.index(getattr(config, f"{kind}_token_id"))]
                placeholders[self._tokenizer.convert_ids_to_tokens(i)] = i
            except Exception as error:  # the code of any family
                found = f"given, but {type(processor).__name__} fails on one: {first_line(error)}"
                expected = f"a model whose text has a token for each feature of the {of_kind.argument}"
                problems[kind] = Problem(of_kind.argument, found, expected)
                del self._kinds[kind]
                self._tokens.pop(kind, None)
        self.tokens = self._tokens
        if not self.tokens:
            raise UserError(problems[next(iter(kinds))])
        self.placeholder_ids = frozenset(placeholders.values())
        self._pattern = re.compile(f"({'|'.join(map(re.escape, placeholders))})")

    @cached_property
    def key(self) -> str:
        """See ``MediaCodec``."""
        return digest(self.processor.to_json_string(), sorted(self.placeholder_ids), _DIGESTS)

    def only(self, kinds: set[MediaKind]) -> "ModelMedia":
        """See ``MediaCodec``."""
        found = copy.copy(self)
        found.tokens = {kind: token for kind, token in self._tokens.items() if kind in kinds}
        return found

    def __or__(self, other: "ModelMedia") -> "ModelMedia":
        return self.only({*self.tokens, *other.tokens})

    @property
    def description(self) -> str:
        """A line for the user."""
        lines = []
        for kind in self.tokens:
            of_kind = self._kinds[kind]
            (text,), name = self._of([(kind, of_kind.sizes[2])]), type(of_kind.part).__name__
            lines.append(
                f"{of_kind.argument}: {name}; {of_kind.describe(of_kind.sizes[2])} are {self.count(text)} tokens"
            )
        return "; ".join(lines)

    def texts(self, media: Sequence[Media], around: Sequence[str] = ()) -> list[str]:
        """See ``MediaCodec``."""
        sizes = [(each.kind, each.size) for each in media]
        if not self._depends_on_row:
            return [text for size in sizes for text in self._of([size])]
        return self._of(sizes, tuple(f"{each[:1]}{each[-1:]}" for each in around)) if media else []

    def count(self, text: str) -> int:
        """See ``MediaCodec``."""
        return len(self._pattern.findall(text))

    def ids(self, text: str) -> frozenset[int]:
        """See ``MediaCodec``."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.content in text)

    def example(self, seed: int) -> tuple[list[int], Media]:
        """See ``MediaCodec``: of each kind in turn."""
        kind = [*self.tokens][seed % len(self.tokens)]
        media = inspect(kind, self._kinds[kind].noise(seed), "")
        return self._encoded(*self.texts([media])), media

    def shown(self, text: str) -> str:
        """Return ``text`` with repeated placeholders shortened to one."""
        return re.sub(rf"{self._pattern.pattern}\1+", r"\1", text)

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
        at = [slice(start, start + size) for start, size, _ in segments]
        rows = [input_ids.ravel()[each] for each in at]
        seen, of_rows = self._of_rows(rows, media)
        positions = {}
        if hasattr(self._reader, "get_rope_index"):
            positions["position_ids"] = self._positions(rows, media, of_rows, seen)
        token_inputs = {}
        for name, values in (of_rows | positions).items():
            filled = torch.zeros(input_ids.size, dtype=torch.int64)
            if name == "position_ids":  # those of padding continue those before it: nothing attends to it
                filled = torch.arange(input_ids.shape[1]).repeat(len(input_ids)).repeat(self._num_axes, 1)
            for where, value in zip(at, values, strict=True):
                filled[..., where] = value
            token_inputs[name] = filled.unflatten(-1, input_ids.shape)
        return {"encoder_inputs": seen, "dummy_inputs": self._dummy_inputs(media), "token_inputs": token_inputs}

    def generation_inputs(self, input_ids: torch.Tensor, media: Sequence[OfSegment]) -> dict[str, Any]:
        """Return the arguments of ``generate`` for prompts [B, T] and the media of each."""
        seen, of_rows = self._of_rows(list(input_ids.numpy()), media)
        given: dict[str, Any] = seen | {name: torch.stack(values) for name, values in of_rows.items()}
        if not any(media):  # it would make the model look for some
            given.pop("mm_token_type_ids", None)
        if dummy := self._dummy_inputs(media):
            given["dummy_media"] = dummy
        return given

    def own_inputs(self, text: str, media: Sequence[Media]) -> dict[str, Any]:
        """See ``MediaCodec``."""
        if not media:  # some processors take no text alone
            ids = torch.tensor([self._encoded(text)])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given = self._given([[(each.kind, self._kinds[each.kind].read(each, "")) for each in media]])
        return dict(self.processor(text=[text], add_special_tokens=False, **given))

    def _of_rows(
        self, rows: Sequence[np.ndarray], media: Sequence[OfSegment]
    ) -> tuple[dict[str, torch.Tensor], dict[str, list[torch.Tensor]]]:
        """The inputs of the encoders for rows of tokens with media; and by name what is known of each row's tokens."""
        types = [name for name in self._accepted if name.endswith("token_type_ids")]
        of_rows = {name: [torch.zeros(len(row), dtype=torch.int64) for row in rows] for name in types}
        with_media = [k for k, each in enumerate(media) if each]
        if not with_media:
            return {}, of_rows
        # They are as one row, unless it matters which others a row has.
        groups = [[k] for k in with_media] if self._depends_on_row else [with_media]
        files = [[self._read(each) for k in group for each in media[k]] for group in groups]
        ids = _padded([np.concatenate([rows[k] for k in group]) for group in groups])
        processed, _ = self._process(files, [("a",) * (len(each) + 1) for each in files], ids.tolist())
        for name in of_rows.keys() & processed.keys():
            for group, value in zip(groups, processed[name], strict=True):
                ends = np.cumsum([len(rows[k]) for k in group]).tolist()
                for k, end in zip(group, ends, strict=True):
                    of_rows[name][k] = value[end - len(rows[k]) : end].long()
        return self._encoder_inputs(processed), of_rows

    def _read(self, given: tuple[Media, str, str]) -> tuple[MediaKind, Any]:
        media, folder, origin = given
        try:
            return media.kind, self._kinds[media.kind].read(media, folder)
        except UserError as error:
            raise UserError(*(Problem(origin, p.found, p.expected, p.fix) for p in error.problems)) from None

    def _positions(
        self,
        rows: Sequence[np.ndarray],
        media: Sequence[OfSegment],
        of_rows: dict[str, list[torch.Tensor]],
        seen: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Positions of each row, [axes, T]: the first axis is that of the text, usually of four."""
        positions = [torch.arange(len(row)).expand(self._num_axes, -1) for row in rows]
        chosen = [k for k, each in enumerate(media) if each]
        if not chosen:
            return positions
        given = {name: pad_sequence([values[k] for k in chosen], True) for name, values in of_rows.items()}
        given["input_ids"] = torch.from_numpy(_padded([rows[k] for k in chosen]))
        given["attention_mask"] = pad_sequence([torch.ones(len(rows[k]), dtype=torch.int64) for k in chosen], True)
        index = self._reader.get_rope_index
        given |= seen
        try:
            found, _ = index(**{name: given[name] for name in given.keys() & _parameters(index)})
        except Exception as error:  # some families know images that follow one another for one
            found = f"{type(self._reader).__name__} finds no positions ({first_line(error)})"
            raise UserError(media[chosen[0]][0][2], found, "text between the images of a row") from None
        for k, of_row in zip(chosen, found.unbind(1), strict=True):  # [axes - 1, T]
            positions[k] = torch.cat([positions[k][:1], of_row[:, : len(rows[k])]])
        return positions

    def _encoder_inputs(self, processed: dict[str, Any]) -> dict[str, torch.Tensor]:
        names = self._accepted - {"input_ids", "attention_mask"}
        return {name: each for name, each in processed.items() if name in names and not name.endswith("type_ids")}

    def _dummy_inputs(self, media: Sequence[OfSegment]) -> dict[str, torch.Tensor]:
        """Inputs of the encoders for which there is nothing in a batch."""
        absent = self.tokens.keys() - {each.kind for of_segment in media for each, _, _ in of_segment}
        return dict(chain.from_iterable(self._dummies[kind].items() for kind in self.tokens if kind in absent))

    @cached_property
    def _dummies(self) -> dict[MediaKind, dict[str, torch.Tensor]]:
        found: dict[MediaKind, dict[str, torch.Tensor]] = {}
        for kind, of_kind in self._kinds.items():
            inputs = self._encoder_inputs(self._process([[(kind, of_kind.blank(of_kind.sizes[0]))]], ["aa"])[0])
            found[kind] = {name: value for name, value in inputs.items() if name in self._of_encoder[kind]}
        return found

    @cached_property
    def _takes_rows(self) -> bool:
        """Whether the processor takes a list of images for each text."""
        images = [[self._kinds["image"].blank(Images.sizes[0])]]
        try:
            self.processor(images=images, text=[self._tokens["image"]], return_tensors="pt")
        except Exception:  # the code of any family
            return False
        return True

    @cached_property
    def _depends_on_row(self) -> bool:
        """Whether the text of an image or a sound is another one beside others, or in another text."""
        for kind, of_kind in self._kinds.items():
            sizes: list[Size] = [(kind, size) for size in of_kind.sizes]
            alone = [self._of_blanks([size])[0] for size in sizes]
            try:
                others = [self._of_blanks(sizes[:1], (each, each))[0] for each in (" ", "\n", "<")]
                adjacent = self._of_blanks(sizes, ("a", "", "", "a"))
                if self._of_blanks(sizes) != alone or {*others} != {alone[0]} or "".join(adjacent) != "".join(alone):
                    return True
            except Exception:  # of several; then it is asked again for a row that has some
                return True
        return False

    @cached_property
    def _counts(self) -> bool:
        """Whether the text of an image is its placeholders alone, and the processor knows their number without one.

        Then no blank image need be resized, which takes longer than to decode one.
        """
        try:
            return all(self._of_blanks([("image", size)]) == self._counted(size) for size in Images.sizes)
        except Exception:  # the code of any family
            return False

    def _counted(self, size: tuple[int, int]) -> list[str]:
        number = self.processor._get_num_multimodal_tokens(image_sizes=[[*size]])["num_image_tokens"][0]
        return [self._tokens["image"] * int(number)]

    def _of(self, sizes: Sequence[Size], around: Sequence[str] = ()) -> list[str]:
        """The texts of a row's images and sounds. Raises ``UserError`` if the processor takes none of these sizes."""
        key = (*sizes, around)
        if (texts := self._texts.get(key)) is not None:
            return texts
        kind, size = sizes[0]
        seconds, lengths = size[0] / size[1], self._lengths
        if is_sound := kind == "audio" and len(sizes) == 1:
            # A longer sound has no fewer placeholders, so between two with the same text all have it.
            at = bisect_left(lengths, (seconds, ""))
            if 0 < at < len(lengths) and lengths[at - 1][1] == lengths[at][1]:
                return [lengths[at][1]]
        try:
            if kind == "image" and len(sizes) == 1 and not around and self._counts:
                texts = self._counted(size)
            else:
                texts = self._of_blanks(sizes, around)
            if is_sound and self.count(texts[0]) < 2:  # the code of Qwen2-Audio takes one for a text as it was
                raise ValueError("too short for the model's processor")
        except Exception as error:  # the code of any family
            raise UserError("", f"{self._kinds[kind].describe(size)}: {first_line(error)}") from None
        if len(self._texts) < _MOST_SIZES:  # most sizes have the text of another one, which may have kilobytes
            self._texts[key] = texts = list(map(sys.intern, texts))
            if is_sound:
                insort(lengths, (seconds, texts[0]))
        return texts

    def _of_blanks(self, sizes: Sequence[Size], around: Sequence[str] = ()) -> list[str]:
        """The texts of images and sounds without content.

        Raises ``ValueError`` if the processor would cut a sound, or if it is too short.
        """
        around = around or ("a",) * (len(sizes) + 1)
        row = [(kind, self._kinds[kind].blank(size)) for kind, size in sizes]
        whole, texts = self._process([row], [around], is_blank=True)
        if any(kind == "audio" for kind, _ in sizes):
            cut, _ = self._process([row], [around])
            if any(np.shape(value) != np.shape(whole[name]) for name, value in cut.items()):
                raise ValueError("the model's processor would cut its end off")
        return texts

    def _given(self, rows: Sequence[Sequence[tuple[MediaKind, Any]]], is_blank: bool = False) -> dict[str, Any]:
        """The arguments of the processor for rows of images and sounds."""
        given: dict[str, Any] = {"return_tensors": "pt"}
        if "mm_token_type_ids" in self._accepted:  # some processors make them only if they are asked
            given["return_mm_token_type_ids"] = True
        for kind, of_kind in self._kinds.items():
            of_rows = [[each for of_each, each in row if of_each == kind] for row in rows]
            if any(of_rows):
                takes_rows = kind == "image" and self._takes_rows
                given[of_kind.argument] = of_rows if takes_rows else list(chain.from_iterable(of_rows))
                given[f"{of_kind.argument}_kwargs"] = of_kind.options | (of_kind.blank_options if is_blank else {})
        return given

    def _process(
        self,
        rows: Sequence[Sequence[tuple[MediaKind, Any]]],
        around: Sequence[Sequence[str]],
        ids: list[list[int]] | None = None,
        is_blank: bool = False,
    ) -> tuple[dict[str, Any], list[str]]:
        """What the processor makes of rows of images and sounds, as tensors; and the text of each of them.

        Args:
            around: of each row the texts before, between and after them.
            ids: the tokens of each row, [B, T], in place of those of such a text.

        Raises whatever the code of the family raises.
        """
        processor = copy.copy(self.processor)
        processor.tokenizer = tokenizer = _Recorder(self._tokenizer, ids)
        processor._check_special_mm_tokens = lambda *_, **__: None  # the text and the ids are not of each other
        texts = [
            "".join(map("".join, zip(_pieces(each), [*(self._tokens[kind] for kind, _ in row), ""], strict=True)))
            for each, row in zip(around, rows, strict=True)
        ]
        processed = processor(text=texts, **self._given(rows, is_blank))
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


def _pieces(around: Sequence[str]) -> list[str]:
    """The ends of the texts around tokens, with a mark between. Nothing is between tokens that stand together."""
    last = len(around) - 1
    return [f"{each[:1]}{_MARK}{each[-1:]}" if each or i in (0, last) else "" for i, each in enumerate(around)]


def _unmarked(text: str, around: Sequence[str]) -> list[str]:
    """What stands for each token in what a processor has made of a row. The first of several together has all.

    Raises ``ValueError`` if it changed the text around them. Before all of it, some put a BOS, as a chat template does.
    """
    anything = f"[^{_MARK}]*"
    found = re.fullmatch(anything + f"({anything})".join(map(re.escape, _pieces(around))), text)
    if found is None:
        raise ValueError("it changes the text around an image")
    return list(found.groups())


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of tokens, padded on the right with zeros: int64 [B, T]."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded


def part_that_reads(model: Any) -> Any:
    """Return the part of a model that takes images or audio: its decoder, or all of it; None if none does."""
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    return next((part for part in (decoder, model) if takes(part, "image") or takes(part, "audio")), None)


def takes(part: Any, kind: MediaKind) -> bool:
    """Return whether a part of a model takes features of images or of sounds."""
    named = {"image": "pixel_values", "audio": "input_features"}[kind]
    names = _parameters(getattr(type(part), "forward", None))
    return hasattr(part, f"get_{kind}_features") or any(named in each for each in names)


def _parameters(function: Any) -> set[str]:
    return set(signature(function).parameters) if function else set()
