"""Turns a block of rows into arrays of ids and weights: parse, check, tokenise, and cut to ``max_length``.

Every row is counted, and problems name their row. Nothing here depends on other blocks, so any process can do it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kit.config.settings.data import DataSettings
from kit.data.chat.formats import MAX_ID, Sample
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.messages import Message
from kit.data.chat.template import Jinja
from kit.data.chat.tokens import MediaCodec, encode_all
from kit.data.chat.unused import Unused, read_keys, without_keys
from kit.data.kinds.answers import ANSWER_ROWS
from kit.data.kinds.kind import Limits, RowKind, Sequences, answer_span
from kit.data.media import KINDS, Media, MediaKind
from kit.data.read.blocks import Block, Part
from kit.data.read.media_files import inspect
from kit.data.read.text import Ending
from kit.data.samples.bad_rows import BadRow, Tally
from kit.data.samples.dataset import Dataset
from kit.data.samples.records import MEDIA, SAMPLE, as_columns
from kit.data.samples.samples import Store
from kit.system.cache import digest
from kit.system.errors import Problem, UserError

# Part of every cache key: raise it whenever the same rows would give other ids or weights, or the files change.
CODE_VERSION = 18
AFTER_ANSWERS = "turns after the last answer are left out"
NO_MEDIA = Problem("images", "given, but this model does not accept images")
REWRITTEN = "the chat template rewrites earlier turns, so these answers have no prompt in common"
_COLUMNS = {kind: column for column, kind in MEDIA_COLUMNS.items()}
FIX_IDS = "use the tokenizer of the model, also to make input_ids"


@dataclass
class Piece(Tally):
    """The samples of a block of rows: N samples with T tokens in all, as arrays for the cache, and messages."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # by name, see ``Store.arrays``

    def __len__(self) -> int:
        return len(self.arrays["samples"])


class _Kept(NamedTuple):
    """A sample to write into a piece."""

    part: int
    number: int  # of its row in that part
    sequences: Sequences
    values: list[float]  # see ``RowKind.values``
    media: list[Media]


@dataclass(frozen=True)
class Encoder:
    """Turns rows into samples: everything that ids and weights depend on, except the rows."""

    tokenizer: Any
    template: Jinja  # Jinja text of the chat template
    settings: DataSettings
    vocab_size: int = MAX_ID  # rows of the model's embedding
    kind: RowKind = ANSWER_ROWS
    media: MediaCodec | None = None
    no_media: Problem = NO_MEDIA  # of a row that has some, if ``media`` is None
    tools: Sequence[dict[str, Any]] = ()  # JSON schemas of those that the chat template lists in every row

    @property
    def max_length(self) -> int:
        """The tokens that a sequence may have."""
        return self.settings.max_length

    @cached_property
    def limits(self) -> Limits:
        """What truncation must know."""
        special = frozenset([*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder])
        return Limits(self.max_length, self.settings.excess_length_strategy, self.tokenizer.bos_token_id, special)

    @property
    def prompts_as_chat(self) -> bool:
        """Whether prompt and completion as texts become a user and an assistant message."""
        return self.settings.chat_template is not None

    @property
    def pack_length(self) -> int:
        """The tokens of a pack: all answers to a prompt are in one."""
        return self.max_length * max(1, len(self.kind.answers))

    def key(self) -> list[Any]:
        """The part of a cache key that identifies this encoder."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        del state["truncation"], state["padding"]  # earlier calls may have set these; they have no effect here
        asked = self.settings
        key = [CODE_VERSION, self.template, self.prompts_as_chat, asked.train_on, asked.max_length]
        key += [asked.excess_length_strategy, asked.system_prompt, self.vocab_size]
        key = [*key, digest(state, self.tokenizer.special_tokens_map), *self.kind.key()]
        key += [self.media.key] if self.media else []
        return [*key, json.dumps(self.tools)] if self.tools else key

    def about(self) -> dict[str, Any]:
        """The facts about this encoder that ``kit cache`` shows."""
        return {
            "tokenizer": self.tokenizer.name_or_path,
            "max_length": self.max_length,
        }

    def as_store(self, dataset: Dataset, piece: Piece) -> Store:
        """Return a piece as if it were all samples of its dataset."""
        about = dataset.source, dataset.entry.name, self.kind, piece.arrays, piece.record()
        return Store(*about, "", partial(self.prompt, dataset), self.media, self.settings.media_folder)

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
        unused = Unused(dataset.format, dataset.fields, dataset.ignored, self.kind.is_demonstration)
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
                    refuse(place, problems, is_common=not self.media or problems[0] in self.media.problems.values())
                elif problem := self.kind.check(sample):
                    refuse(place, [problem])
                elif self.tools and (problem := _beside_tools(sample)):
                    refuse(place, [problem], is_common=True)
                else:
                    places.append(place)
                    samples.append(sample)
        piece.unused = unused.counts
        kept: list[_Kept] = []
        for place, sample, result in zip(places, samples, self._encode_all(samples), strict=True):
            if isinstance(result, Problem):  # usually about the template, so many rows have the same one
                refuse(place, [result], is_common=result.where not in ("", "completion", *self.kind.answers))
                continue
            if self.tools and len(result) > 1:
                fix = "--train_on last; or make a row of each, with the turns before it as the prompt"
                refuse(place, [Problem("messages", REWRITTEN, "one answer, with --tools", fix)], is_common=True)
                continue
            every = list(chain.from_iterable(result))
            if max(chain.from_iterable(encoded.input_ids for encoded in every)) >= self.vocab_size:
                found = f"a token id out of range for the model's vocabulary of {self.vocab_size}"
                refuse(place, [Problem("tokens", found, fix=FIX_IDS)], is_common=True)
                continue
            media = sample.get("media", [])
            if self.media and (problem := _wrong_placeholders(result, media, self.media, self.kind.is_demonstration)):
                refuse(place, [problem])
                continue
            piece.counts["num_rows"] += 1
            piece.counts["num_encoded"] += len(result)  # more than rows where a template rewrites earlier turns
            piece.counts[f"num_{every[0].form}"] += 1
            piece.remarks.update(set(chain.from_iterable(encoded.remarks for encoded in every)))
            if (
                self.settings.train_on != "all"
                and not self.kind.pools
                and _ends_without_answer(sample, self.kind.answers)
            ):
                piece.remarks[AFTER_ANSWERS] += 1
            for sequences in result:
                num_tokens = max(len(encoded.input_ids) for encoded in sequences)
                is_long = self.kind.is_cut and num_tokens > self.max_length
                if is_long and self.settings.excess_length_strategy == "error":
                    fix = "raise --max_length; or --excess_length_strategy truncate"
                    found, expected = f"{num_tokens} tokens", f"at most {self.max_length}"
                    piece.problems.append(Problem(source.origin(*place), found, expected, fix))
                    continue
                if is_long and sequences[0].num_media:  # neither images nor sounds are cut
                    piece.counts["num_dropped_media"] += 1
                    continue
                shown = media[: sequences[0].num_media]
                pieces = self._cut(sequences, piece) if is_long else [sequences]
                weighted = [self.kind.weighted(sample, each) for each in pieces]
                piece.counts["num_dropped_unsupervised"] += weighted.count(None)
                kept += [_Kept(*place, each, self.kind.values(sample, each), shown) for each in weighted if each]
        piece.bad.sort(key=lambda row: (row.part, row.number))
        piece.arrays = _arrays(kept, self.kind.pools) | (_arrays_of_media(kept) if self.media else {})
        return piece

    def _inspect(self, sample: Sample, part: Part) -> list[Problem]:
        """Replace the media of a sample by what is known of their files. Returns their problems."""
        if "media" not in sample:
            return []
        if self.media is None:
            return [no_media_of(sample["media"][0][0], self.no_media)]
        folder = self.settings.media_folder or part.folder
        problems: list[Problem] = []
        found: list[Media] = []
        for i, (kind, given) in enumerate(sample["media"]):
            if kind in self.media.problems:
                return [self.media.problems[kind]]
            try:
                found.append(inspect(kind, given, folder))
                self.media.texts(found[-1:])
            except UserError as error:
                problems += [replace(each, where=f"{_COLUMNS[kind]}[{i}]") for each in error.problems]
        sample["media"] = found
        return problems

    def _encode_all(self, samples: Sequence[Sample]) -> list[list[Sequences] | Problem]:
        """Encode samples, each to its sequences, or to the problem for which it is refused."""
        parts = [self.kind.parts(sample) for sample in samples]
        every_part = list(map(self._as_rendered, chain.from_iterable(parts)))
        left = iter(encode_all(every_part, self.tokenizer, self.template, self.settings.train_on, self.media))
        return [
            self.kind.join(sample, list(islice(left, len(of_sample))))
            for sample, of_sample in zip(samples, parts, strict=True)
        ]

    def _as_rendered(self, sample: Sample) -> Sample:
        """A sample as the chat template is given it."""
        if self.prompts_as_chat:
            sample = as_chat(sample)
        if system := self.settings.system_prompt:
            sample = with_system(sample, system)
        return {**sample, "tools": list(self.tools)} if self.tools else sample

    def prompt(self, dataset: Dataset, row: Any) -> list[Message]:
        """Return the messages before the answer to generate, of a row that became a sample with messages."""
        sample = dataset.sample(without_keys(row, read_keys(dataset.ignored)))
        assert isinstance(sample, dict)
        sample = self._as_rendered(sample)
        if "prompt" in sample and "completion" not in sample:
            return list(sample["prompt"])
        messages = sample.get("messages") or [*sample["prompt"], *sample["completion"]]
        answers = (i for i, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight") != 0)
        return messages[: max(answers)]

    def answer_ends(self) -> set[int]:
        """Return the token with which the chat template ends an answer, for prompts without any.

        Raises ``UserError`` if the template refuses an answer.
        """
        problems = []
        for text in ("?", "<think>\n?\n</think>\n\n?"):  # some open a <think> block
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
            (found,) = encode_all([{"messages": messages}], self.tokenizer, self.template)
            if not isinstance(found, Problem):
                return {found[0].input_ids[answer_span(found[0].weights)[1] - 1]}
            problems.append(found)
        raise UserError(problems[0])

    def _cut(self, sequences: Sequences, piece: Piece) -> list[Sequences]:
        """Cut a sample that is too long, which may leave none or several. Adds to the counts of ``piece``."""
        strategy = self.limits.strategy
        cut, remark = ([], "") if strategy == "drop" else self.kind.cut(sequences, self.limits)
        outcome = "num_dropped_long" if not cut else "num_split" if strategy == "split" else "num_truncated"
        piece.counts[outcome] += 1
        if cut and remark:
            piece.remarks[remark] += 1
        return cut


def no_media_of(kind: MediaKind, problem: Problem) -> Problem:
    """Return the problem of a row with media of this kind, given that of one with images."""
    return Problem(*(each.replace("images", _COLUMNS[kind]) for each in astuple(problem)[:4]))


def _beside_tools(sample: Sample) -> Problem | None:
    """The problem of a row to whose prompt tools cannot be added."""
    if not sample.keys() & {"messages", "prompt"}:
        return Problem("tools", "given, but this row is no conversation", "messages, or a prompt and a completion")
    for key in ("tools", "chat_template_kwargs"):
        if sample.get(key):
            fix = f"--dataset_columns {key}=ignore"
            return Problem(key, "a row's own, beside --tools or --environment", "rows without them", fix)
    return None


def as_chat(sample: Sample) -> Sample:
    """Return a prompt and a completion that are strings as messages of a user and an assistant; all else as it is."""
    if not isinstance(sample.get("prompt"), str):
        return sample
    roles = {"prompt": "user", "completion": "assistant"}
    texts = {key: [{"role": role, "content": sample[key]}] for key, role in roles.items() if key in sample}
    return {**sample, **texts}


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


def _ends_without_answer(sample: Sample, answers: tuple[str, ...]) -> bool:
    """Whether the last message of a conversation is not an answer."""
    conversations = [sample[name] for name in ("messages", "completion", *answers) if name in sample]
    return any(isinstance(each, list) and each and each[-1]["role"] != "assistant" for each in conversations)


def _wrong_placeholders(
    result: Sequence[Sequences], media: Sequence[Media], placeholders: MediaCodec, are_demonstrations: bool
) -> Problem | None:
    """The problem of a row whose tokens have another number of placeholders than its media have features.

    Or the problem of a preference row with an image after its first answer: both answers share the images of the
    prompt, and kto pairs the answer with another prompt.
    """
    for encoded in chain.from_iterable(result):
        wanted = sum(map(placeholders.count, placeholders.texts(media[: encoded.num_media])))
        found = sum(map(placeholders.placeholder_ids.__contains__, encoded.input_ids))
        if found != wanted:
            text = f"{found} placeholders in its tokens, for {wanted} features of its images and sounds"
            return Problem("", text, "only those of its media: the text itself contains such a token")
        first = next((i for i, weight in enumerate(encoded.weights) if i and weight), 0)
        if not are_demonstrations and first and not placeholders.placeholder_ids.isdisjoint(encoded.input_ids[first:]):
            return Problem("images", "one after the first answer", "all in the prompt, before the answers")
    return None


def _arrays_of_media(kept: Sequence[_Kept]) -> dict[str, np.ndarray]:
    """The media of samples as arrays: what several have in common, once."""
    places: dict[bytes, int] = {}
    records, data, end = [], [], 0
    for each in chain.from_iterable(sample.media for sample in kept):
        if each.data not in places:
            places[each.data] = end
            data.append(each.data)
            end += len(each.data)
        about = KINDS.index(each.kind), each.is_path, each.size, each.digest, each.stamp
        records.append((places[each.data], len(each.data), *about))
    return {
        "media": np.array(records, MEDIA),
        "media_counts": np.array([len(sample.media) for sample in kept], np.int32),
        "media_data": np.frombuffer(b"".join(data), np.uint8),
    }


def _arrays(kept: Sequence[_Kept], pools: bool) -> dict[str, np.ndarray]:
    """Samples as arrays. ``pools``: a head reads the states of the supervised tokens."""
    encoded = [each for sample in kept for each in sample.sequences]
    num_tokens = sum(len(each.input_ids) for each in encoded)
    input_ids = np.fromiter(chain.from_iterable(each.input_ids for each in encoded), np.int32, num_tokens)
    weights = np.fromiter(chain.from_iterable(each.weights for each in encoded), np.float32, num_tokens)
    lengths = [[len(each.input_ids) for each in sample.sequences] for sample in kept]
    samples = []
    end = 0
    for sample, own_lengths in zip(kept, lengths, strict=True):
        start, end = end, end + sum(own_lengths)
        targets = weights[start + (not pools) : end]  # nothing predicts a first token
        ids_hash = xxhash.xxh3_64_intdigest(input_ids[start:end].data)
        if sample.media:
            ids_hash = xxhash.xxh3_64_intdigest(f"{ids_hash} {[each.digest for each in sample.media]}".encode())
        counts = np.count_nonzero(targets), targets.sum(dtype=np.float64)
        samples.append((start, end - start, sample.part, sample.number, *counts, ids_hash))
    arrays = {"samples": np.array(samples, SAMPLE), "input_ids": input_ids, "weights": weights}
    arrays |= as_columns("sequence_length", lengths, np.int32)
    return arrays | as_columns("value", [sample.values for sample in kept], np.float64)
