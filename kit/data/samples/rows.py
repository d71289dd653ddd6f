"""Turns a block of rows into arrays of ids and weights: parse, check, tokenise, and cut to ``max_length``.

Every row is counted, and problems name their row. Nothing here depends on other blocks, so any process can do it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kit.config.settings.data import DataSettings
from kit.data.chat.formats import MAX_ID, Sample
from kit.data.chat.template import Jinja
from kit.data.chat.tokens import Encoded, Placeholders, encode_all
from kit.data.chat.unused import Unused, read_keys, without_keys
from kit.data.read import image_files as image_files
from kit.data.read.blocks import Block, Part
from kit.data.read.text import Ending
from kit.data.samples.bad_rows import BadRow, Tally
from kit.data.samples.dataset import Dataset
from kit.data.samples.halves import (
    ANSWERS,
    PROMPT_CUT,
    Halves,
    in_a_row,
    joined,
    parts_to_encode,
    pooled,
    shortened,
    without_start_of_prompt,
)
from kit.data.samples.records import IMAGE, PREFERENCE, SAMPLE, StoredImages
from kit.system.cache import digest
from kit.system.errors import Problem, UserError, listed
from kit.tasks.spec import Rows

# Part of every cache key: raise it whenever the same rows would give other ids or weights, or the files change.
CODE_VERSION = 14
AFTER_ANSWERS = "turns after the last answer are left out"
NO_IMAGES = Problem("images", "given, and the model reads none")
FIX_IDS = "use the tokenizer of the model, also to make input_ids"
START_CUT = "their start was cut off, because excess_length_strategy is keep_end"


@dataclass
class Piece(Tally):
    """What a block of rows became: N samples with T tokens in all, as arrays for the cache, and messages."""

    samples: np.ndarray = field(default_factory=lambda: np.empty(0, SAMPLE))  # [N], `start` within this piece
    input_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # [T]
    weights: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))  # [T]
    preferences: np.ndarray | None = None  # PREFERENCE [N]; None: the rows hold answers alone
    heads: dict[str, np.ndarray] = field(default_factory=dict)  # what a head needs: see ``Store.arrays``
    # If the model reads images: those of all samples, IMAGE [M]; of each sample their number, int32 [N]; and bytes.
    images: np.ndarray | None = None
    image_counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    image_data: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """``(input_ids int32 [T], weights float32 [T])`` of sample ``i``."""
        start, length = self.samples["start"][i], self.samples["length"][i]
        return self.input_ids[start : start + length], self.weights[start : start + length]

    @cached_property
    def stored_images(self) -> StoredImages:
        """The images of its samples, if the model reads images."""
        return StoredImages(self.arrays())

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, as a cache entry has them."""
        arrays = {"samples": self.samples, "input_ids": self.input_ids, "weights": self.weights}
        arrays |= self.heads | ({} if self.preferences is None else {"preferences": self.preferences})
        if self.images is None:
            return arrays
        return arrays | {"images": self.images, "image_counts": self.image_counts, "image_data": self.image_data}


class _Kept(NamedTuple):
    """A sample to write into a piece."""

    part: int
    number: int  # of its row in that part
    halves: Halves
    label: bool
    images: list[image_files.Image]
    values: list[float]  # of a head: the margin of a pair, or the numbers of the labels


@dataclass(frozen=True)
class Encoder:
    """How rows become samples: everything that ids and weights depend on, except the rows themselves."""

    tokenizer: Any
    template: Jinja  # Jinja text of the chat template
    settings: DataSettings
    vocab_size: int = MAX_ID  # rows of the model's embedding
    wanted: Rows = "answers"  # what the rows hold
    images: Placeholders | None = None
    no_images: Problem = NO_IMAGES  # of a row that has some, if ``images`` is None
    pooling: str = ""  # of which tokens a head reads the states: ``last`` or ``mean``; empty: tokens are predicted
    labels: tuple[str, ...] = ()  # that rows may have; numbers stand for them if they are names
    has_several: bool = False  # whether a row may have any number of labels, else one

    @property
    def max_length(self) -> int:
        """The tokens that a sample may have; of a pair, each of its halves."""
        return self.settings.max_length

    @property
    def prompts_as_chat(self) -> bool:
        """Whether prompt and completion as texts become a user and an assistant message."""
        return self.settings.chat_template is not None

    @property
    def pack_length(self) -> int:
        """The tokens of a pack: both halves of a pair are in one."""
        return self.max_length * (2 if self.wanted in ("pairs", "compared") else 1)

    def key(self) -> list[Any]:
        """What identifies this encoder in the key of a cache entry."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        del state["truncation"], state["padding"]  # earlier calls may have set these; they have no effect here
        asked = self.settings
        key = [CODE_VERSION, self.template, self.prompts_as_chat, asked.train_on, asked.max_length, self.wanted]
        key += [asked.excess_length_strategy, asked.system_prompt, self.vocab_size]
        key = [*key, digest(state, self.tokenizer.special_tokens_map)]
        key += [self.pooling, self.has_several, *self.labels] if self.pooling else []
        return [*key, self.images.key] if self.images else key

    def about(self) -> dict[str, Any]:
        """What ``kit cache`` shows of this encoder."""
        return {
            "tokenizer": self.tokenizer.name_or_path,
            "max_length": self.max_length,
        }

    def encode_block(self, dataset: Dataset, part: int, block: Block) -> Piece:
        """Parse, check and tokenise a block of the source's part number ``part``."""
        rows = ((part, number, row) for number, row in dataset.source.parts[part].rows(block))
        return self.encode(dataset, rows)

    def encode(self, dataset: Dataset, rows: Iterable[tuple[int, int, Any]]) -> Piece:
        """Check and tokenise rows, each given as the number of its part, its own number, and its parsed content.

        What is wrong with rows is not raised: it is in ``Piece.bad`` and ``Piece.problems``.
        """
        source = dataset.source
        piece = Piece()
        unused = Unused(dataset.fields, dataset.ignored)
        ignored_keys = read_keys(dataset.ignored)
        unread = set(source.columns) - set(dataset.columns)
        places: list[tuple[int, int]] = []  # of each sample: part, number of its row
        samples: list[Sample] = []

        def refuse(place: tuple[int, int], problems: Iterable[Problem], is_common: bool = False) -> None:
            piece.bad += [BadRow(*place, source.origin(*place), problem, is_common) for problem in problems]

        for part, number, row in rows:
            place = part, number
            if row is None:
                piece.counts["num_blank_lines"] += 1
            elif isinstance(row, Ending):
                piece.problems.append(row)
            elif isinstance(row, Problem):
                refuse(place, [replace(row, where=row.where.removeprefix(source.origin(*place)).strip())])
            else:
                row = without_keys(row, ignored_keys)
                unused_problems = unused.check(row)
                if source.parts[part].has_schema:  # then only some columns were read
                    unused.counts.update(unread)
                sample = dataset.sample(row)
                if isinstance(sample, list):
                    refuse(place, sample)
                elif unused_problems:
                    refuse(place, unused_problems, is_common=True)
                elif problems := self._inspect(sample, source.parts[part]):
                    refuse(place, problems, is_common=self.images is None)
                elif self.labels and (problem := self._number_labels(sample)):
                    refuse(place, [problem])
                else:
                    places.append(place)
                    samples.append(sample)
        piece.unused = unused.counts
        kept: list[_Kept] = []
        for place, sample, result in zip(places, samples, self._encode_all(samples), strict=True):
            if isinstance(result, Problem):  # usually about the template, so many rows have the same one
                refuse(place, [result], is_common=result.where not in ANSWERS)
                continue
            every = list(chain.from_iterable(result))
            if max(chain.from_iterable(encoded.input_ids for encoded in every)) >= self.vocab_size:
                found = f"a token id for which the model, of {self.vocab_size} embeddings, has none"
                refuse(place, [Problem("tokens", found, fix=FIX_IDS)], is_common=True)
                continue
            images = sample.get("images", [])
            if self.images and (problem := _wrong_placeholders(result, images, self.images, self.wanted != "answers")):
                refuse(place, [problem])
                continue
            piece.counts["num_rows"] += 1
            piece.counts["num_encoded"] += len(result)  # more than rows where a template rewrites earlier turns
            piece.counts[f"num_{every[0].form}"] += 1
            piece.remarks.update(set(chain.from_iterable(encoded.remarks for encoded in every)))
            if self.settings.train_on != "all" and _ends_without_answer(sample):
                piece.remarks[AFTER_ANSWERS] += 1
            for halves in result:
                num_tokens = max(len(encoded.input_ids) for encoded in halves)
                if num_tokens > self.max_length and self.settings.excess_length_strategy == "error":
                    fix = "raise --max_length; or --excess_length_strategy truncate cuts it"
                    found, expected = f"{num_tokens} tokens", f"at most {self.max_length}"
                    piece.problems.append(Problem(source.origin(*place), found, expected, fix))
                    continue
                if num_tokens > self.max_length and halves[0].num_images:  # an image is never cut
                    piece.counts["num_dropped_images"] += 1
                    continue
                shown = images[: halves[0].num_images]
                is_good, values = sample.get("label") is not False, sample.get("values", [])
                kept += [_Kept(*place, cut, is_good, shown, values) for cut in self._cut(halves, piece)]
        piece.bad.sort(key=lambda row: (row.part, row.number))
        _fill(piece, kept, self.wanted, bool(self.pooling))
        if self.images:
            _fill_images(piece, kept)
        return piece

    def _number_labels(self, sample: Sample) -> Problem | None:
        """Put the numbers of the labels of a sample into ``values``. Returns what is wrong with them."""
        names, known = sample["label"], {name: i for i, name in enumerate(self.labels)}
        if not any(map(str.isdecimal, self.labels)):
            known = {str(i): i for i in known.values()} | known
        if unknown := [name for name in names if name not in known]:
            expected = f"one of {listed(self.labels)}, or --labels with the names of all, in the order of its scores"
            return Problem("label", f"{unknown[0]!r} is no label of this model", expected)
        if len(names) != 1 and not self.has_several:
            fix = "--problem_type multi_label_classification"
            return Problem("label", f"{len(names)} labels", "one, as other rows have", fix)
        sample["values"] = [float(known[name]) for name in names]
        return None

    def _inspect(self, sample: Sample, part: Part) -> list[Problem]:
        """Replace the images of a sample by what their headers say. Returns what is wrong with them."""
        if "images" not in sample:
            return []
        if self.images is None:
            return [self.no_images]
        folder = self.settings.image_folder or part.folder
        problems: list[Problem] = []
        found: list[image_files.Image] = []
        for i, given in enumerate(sample["images"]):
            try:
                image = image_files.inspect(given, folder)
                self.images.of(image.height, image.width)
                found.append(image)
            except UserError as error:
                problems += [replace(each, where=f"images[{i}]") for each in error.problems]
        sample["images"] = found
        return problems

    def _encode_all(self, samples: Sequence[Sample]) -> list[list[Halves] | Problem]:
        """Encode samples, each to what it became: of a pair both halves, of any other sample the one that it has."""
        parts = [parts_to_encode(sample, self.wanted) for sample in samples]
        every_part = list(chain.from_iterable(parts))
        if self.prompts_as_chat:
            every_part = list(map(as_chat, every_part))
        if system := self.settings.system_prompt:
            every_part = [with_system(part, system) for part in every_part]
        results = encode_all(every_part, self.tokenizer, self.template, self.settings.train_on, self.images)
        if self.wanted == "answers":
            return [each if isinstance(each, Problem) else [(encoded,) for encoded in each] for each in results]
        left = iter(results)
        return [
            joined(sample, list(islice(left, len(of_sample)))) for sample, of_sample in zip(samples, parts, strict=True)
        ]

    def pieces(self, ids: Sequence[int]) -> list[list[slice]]:
        """Return what of a sample longer than ``max_length`` is kept: for each piece, the slices that it joins."""
        limit = self.max_length
        strategy = self.settings.excess_length_strategy
        if strategy == "drop":
            return []
        if strategy == "split":
            # Neighbouring pieces share a token, so that every token except the very first is a target once.
            return [[slice(i, i + limit)] for i in range(0, len(ids) - 1, limit - 1)]
        if strategy == "keep_end":
            num_first = 1 if ids[0] == self.tokenizer.bos_token_id else 0  # tokens kept of the start: BOS stays first
            return [[slice(0, num_first), slice(len(ids) - limit + num_first, len(ids))]]
        return [[slice(0, limit)]]

    def _cut(self, halves: Halves, piece: Piece) -> list[Halves]:
        """Cut a sample to ``max_length``, which may leave none or several. Adds to the counts of ``piece``.

        Of answers with a prompt in common only the prompt is cut.
        """
        strategy, cut = self.settings.excess_length_strategy, [halves]
        if max(len(half.input_ids) for half in halves) > self.max_length:
            # Of a pair with a prompt, that is cut.
            of_texts = bool(self.pooling) and (self.wanted != "compared" or 0.0 not in halves[0].weights)
            if of_texts and strategy != "drop":
                special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
                limit, from_start = self.max_length, strategy == "keep_end"
                texts = tuple(shortened(half, limit, special, from_start) for half in halves)
                # Two texts that differ only in what was cut teach nothing.
                is_same = self.wanted == "compared" and texts[0].input_ids == texts[1].input_ids
                cut = [] if is_same else [texts]
            elif of_texts:
                cut = []
            elif self.wanted == "answers":
                ids, weights = halves[0].input_ids, halves[0].weights
                cut = [
                    (Encoded([i for kept in slices for i in ids[kept]], [w for kept in slices for w in weights[kept]]),)
                    for slices in self.pieces(ids)
                ]
            else:
                shorter = without_start_of_prompt(halves, self.max_length, self.tokenizer.bos_token_id)
                cut = [shorter] if shorter and strategy != "drop" else []
            piece.counts[
                "num_dropped_long" if not cut else "num_split" if strategy == "split" else "num_truncated"
            ] += 1
            if cut and (strategy == "keep_end" if of_texts or self.wanted == "answers" else True):
                piece.remarks[START_CUT if of_texts or self.wanted == "answers" else PROMPT_CUT] += 1
        if self.pooling:
            return [pooled(each, self.pooling) for each in cut]
        supervised = [each for each in cut if any(each[0].weights[1:])]
        piece.counts["num_dropped_unsupervised"] += len(cut) - len(supervised)
        return supervised


def as_chat(sample: Sample) -> Sample:
    """Return a prompt and a completion that are strings as messages of a user and an assistant; all else as it is."""
    if not isinstance(sample.get("prompt"), str):
        return sample
    prompt = [{"role": "user", "content": sample["prompt"]}]
    return {**sample, "prompt": prompt, "completion": [{"role": "assistant", "content": sample["completion"]}]}


def with_system(sample: Sample, text: str) -> Sample:
    """Return a sample with ``text`` as its system message, if it is a conversation that has none, or a blank one."""
    name = "messages" if "messages" in sample else "prompt"
    messages = sample.get(name)
    if not isinstance(messages, list):
        return sample
    has_own = bool(messages) and messages[0]["role"] == "system"
    if has_own and messages[0]["content"].strip():
        return sample
    return {**sample, name: [{"role": "system", "content": text}, *messages[has_own:]]}


def _ends_without_answer(sample: Sample) -> bool:
    """Whether the last message of a conversation is not an answer."""
    conversations = [sample[name] for name in ("messages", *ANSWERS) if name in sample]
    return any(isinstance(each, list) and each and each[-1]["role"] != "assistant" for each in conversations)


def _wrong_placeholders(
    result: Sequence[Halves], images: Sequence[image_files.Image], placeholders: Placeholders, are_judged: bool
) -> Problem | None:
    """The problem of a row whose tokens have another number of placeholders than its images have features.

    Or of answers that are judged, and an image behind the first of them: both of a pair have the images of the prompt,
    and kto sets another prompt before what follows it.
    """
    for encoded in chain.from_iterable(result):
        wanted = sum(placeholders.count(each.height, each.width) for each in images[: encoded.num_images])
        found = encoded.input_ids.count(placeholders.placeholder_id)
        if found != wanted:
            text = f"{found} placeholders of images in its tokens, for {wanted} features"
            return Problem("", text, "none but those of its images: the token stands in the text itself")
        first = next((i for i, weight in enumerate(encoded.weights) if i and weight), 0)
        if are_judged and first and placeholders.placeholder_id in encoded.input_ids[first:]:
            return Problem(
                "images", "one behind the first answer", "all in the prompt, before the answers that are judged"
            )
    return None


def _fill_images(piece: Piece, kept: Sequence[_Kept]) -> None:
    """Write the images of the samples into the arrays of ``piece``: what several have in common, once."""
    places: dict[bytes, int] = {}
    records, data, end = [], [], 0
    for image in chain.from_iterable(sample.images for sample in kept):
        if image.data not in places:
            places[image.data] = end
            data.append(image.data)
            end += len(image.data)
        size = image.height, image.width
        records.append((places[image.data], len(image.data), image.is_path, *size, image.digest, image.stamp))
    piece.images = np.array(records, IMAGE)
    piece.image_counts = np.array([len(sample.images) for sample in kept], np.int32)
    piece.image_data = np.frombuffer(b"".join(data), np.uint8)


def _fill(piece: Piece, kept: Sequence[_Kept], wanted: Rows, pools: bool) -> None:
    """Write the samples into the arrays of ``piece``. ``pools``: a head reads the states of the supervised tokens."""
    encoded = [half for sample in kept for half in sample.halves]
    if not pools:
        encoded = [in_a_row(sample.halves) for sample in kept]
    else:
        piece.heads = {
            "text_lengths": np.array([len(text.input_ids) for text in encoded], np.int32),
            "text_counts": np.array([len(sample.halves) for sample in kept], np.int32),
            "head_values": np.array([value for sample in kept for value in sample.values], np.float32),
            "head_value_counts": np.array([len(sample.values) for sample in kept], np.int32),
        }
    num_tokens = sum(len(each.input_ids) for each in encoded)
    piece.input_ids = np.fromiter(chain.from_iterable(each.input_ids for each in encoded), np.int32, num_tokens)
    piece.weights = np.fromiter(chain.from_iterable(each.weights for each in encoded), np.float32, num_tokens)
    samples, preferences = [], []
    end = 0
    for sample in kept:
        start, end = end, end + sum(len(half.input_ids) for half in sample.halves)
        targets = piece.weights[start + (not pools) : end]  # nothing predicts a first token
        ids_hash = xxhash.xxh3_64_intdigest(piece.input_ids[start:end].data)
        if sample.images:
            ids_hash = xxhash.xxh3_64_intdigest(f"{ids_hash} {[image.digest for image in sample.images]}".encode())
        counts = np.count_nonzero(targets), targets.sum(dtype=np.float64)
        samples.append((start, end - start, sample.part, sample.number, *counts, ids_hash))
        if pools:
            continue
        first_length = len(sample.halves[0].input_ids)
        first = targets[: first_length - 1]
        of_first = np.flatnonzero(first)[0] + 1, first_length, first.sum(dtype=np.float64)
        preferences.append((*of_first, sample.label))
    piece.samples = np.array(samples, SAMPLE)
    if wanted != "answers" and not pools:
        piece.preferences = np.array(preferences, PREFERENCE)
