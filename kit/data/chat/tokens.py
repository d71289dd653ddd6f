"""Samples as token ids, and the weight of each token in the loss. Pure: the caller passes in the tokenizer.

Promises:

- Supervised tokens are found by their position in the rendered text (``turns.py``), never by comparing token ids.
- The tokens before a supervised span are those of the prompt tokenised alone, as at inference: if a token would
  straddle the border, the text is cut there. (After such a cut an earlier answer keeps its own tokens.)
- There is one BOS, never two: with a chat template, the template alone decides; prompt + completion and text get one
  if the tokenizer has one.
- A sample that cannot be encoded like this is refused, with the reason.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from kit.data.chat.formats import IGNORED
from kit.data.chat.template import FIXED_DATE, Jinja, Messages, Template, Tools
from kit.data.chat.turns import Draft, Drafters, TrainOn
from kit.data.media import Media, MediaKind
from kit.system.errors import Problem, UserError

NEWLINE_ADDED = "a newline was put between a prompt and a completion that would have run together"
NO_BOS = "the chat template writes no BOS, which the tokenizer puts before any other text"
NO_NAMES = "the chat template leaves out the name of a message, so the model never sees it"
UNROLLED = (
    "the chat template rewrites earlier turns: the conversation became several samples, each with the answers that "
    "the model would give after the same text"
)
MAX_BEFORE = 1 << 25  # characters that are tokenised again for the answers of one conversation: seconds
AT_ONCE = 1 << 20  # of them, tokenised at once

Ids = list[int]
Tokens = tuple[Ids, Any]  # ids, and the tokenizer's Encoding; of LocatedTexts it knows the characters of each token
# The encoding of one sample, as a generator: it yields texts and is sent their tokens. So the texts of many samples are
# tokenised together, which is faster.
TokenRequests = Generator[list[str], list[Tokens], Any]


class LocatedTexts(list[str]):
    """Texts for which the characters of each token are needed."""


class Cut(NamedTuple):
    """Where to find a span of a draft among the tokens of the draft's whole text.

    The text up to the span, from the last token at which the tokenizer splits the text, is tokenised on its own; where
    its tokens end, the span begins.
    """

    begin: int  # index of that splitting token; 0 if there is none
    before: str  # the text from that token up to the span
    stop: int  # index of the first token after the span; 0 if a token straddles the span's end


# The forms of texts: chat: rendered by the chat template, or token ids; ended: plain text with EOS; plain: as the
# tokenizer encodes it.
FORMS = ("chat", "ended", "plain")


def form_of(*counts: Mapping[str, int]) -> str:
    """Return the form of texts for a model of them all, given how many of each dataset have which."""
    return next((form for form in FORMS if any(each.get(f"num_{form}") for each in counts)), FORMS[0])


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a sample, and their weights."""

    input_ids: list[int]  # [T]
    weights: list[float]  # [T], of each token in the loss as a target; 0: masked out
    remarks: tuple[str, ...] = ()  # for the user; if a conversation became several samples, the first has them
    num_media: int = 0  # the first ones of the sample stand in it
    form: str = FORMS[0]


class MediaCodec(Protocol):
    """Makes placeholders in a text, and inputs of encoders (``kit.model.media.codec.ModelMedia``)."""

    tokens: dict[MediaKind, str]  # what a chat template writes for each kind that the model reads
    problems: dict[MediaKind, Problem]  # of a row with another kind
    placeholder_ids: frozenset[int]  # tokens in whose places the model puts features
    added_ids: frozenset[int]  # the tokenizer's added tokens, also those that stand for other media

    @property
    def description(self) -> str:
        """A line for the user."""

    @property
    def key(self) -> str:
        """What identifies all this in the key of a cache entry."""

    def texts(self, media: Sequence[Media], around: Sequence[str] = ()) -> list[str]:
        """Return the text of each image of a row: one placeholder per feature, with the tokens around them.

        Args:
            around: the texts before, between and after them, on which some processors make it depend. Of images with
                nothing between them, the first one's text may be that of all.

        Raises ``UserError`` if the processor refuses one.
        """

    def count(self, text: str) -> int:
        """Return the number of placeholders in such a text."""

    def ids(self, text: str) -> frozenset[int]:
        """Return the ids of the added tokens in that text."""

    def only(self, kinds: set[MediaKind]) -> "MediaCodec":
        """Return the codec of data that have no other kinds, in which no other encoder need run."""

    def __or__(self, other: Any) -> "MediaCodec":
        """Return the codec of data with the kinds of both."""

    def example(self, seed: int) -> tuple[list[int], Media]:
        """Return the ids that stand for random colours or noise, and these; one of each kind in turn."""

    def own_inputs(self, text: str, media: Sequence[Media]) -> dict[str, Any]:
        """Return the inputs of a row with media as the processor itself makes them of a text with ``tokens``."""

    def shown(self, text: str) -> str:
        """Return a decoded prompt with one placeholder for each image."""

    def inputs(self, input_ids: Any, segments: Any, media: Any) -> dict[str, Any]:
        """Return the fields of ``MicroBatch`` for the images of its segments."""

    def generation_inputs(self, input_ids: Any, media: Any) -> dict[str, Any]:
        """Return the model's inputs for prompts with these images, without the ids."""


def encode_all(
    samples: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template: Jinja,
    train_on: TrainOn = "assistant",
    media: MediaCodec | None = None,
) -> list[list[Encoded] | Problem]:
    """Encode samples in the kit's form (``formats.to_sample``); many at a time is faster than one by one.

    The result has, for each sample, what it became, or the ``Problem`` for which it must be refused.

    - ``messages``: every assistant turn is supervised with its ``weight`` (1 if it has none); with ``train_on="last"``
      only the last one. Usually one ``Encoded``; several where the template rewrites earlier turns.
    - ``prompt`` and ``completion``: as lists of messages only the completion's assistant turns are supervised. As
      texts: BOS + prompt + completion + EOS, completion and EOS supervised. The texts are not changed, with one
      exception: if there is no whitespace on either side of the border, the *completion* gets a leading newline. The
      model is trained to write it, so at inference the prompt is exactly the user's text.
    - ``prompt`` alone: with the generation prompt if it is a list of messages, with BOS if it is a text. All weights
      are 0.
    - ``text``: BOS + text + EOS, all supervised.
    - ``media`` (``Media``) with one of the former: the token that the template writes for one is replaced
      by its placeholders, which are never supervised.
    - ``plain``, a text or two: what the tokenizer itself makes of them, with its special tokens.
    - ``input_ids``: taken as they are; supervised are all or, if there are ``labels``, those whose label is not -100.

    With ``train_on="all"`` every token of messages, prompts and completions has weight 1, and an assistant turn must
    have no other ``weight``.

    Raises ``UserError`` if the tokenizer is a slow one, which does not know the characters of a token.
    """
    if not tokenizer.is_fast:
        raise UserError("model_name_or_path", "its tokenizer is a slow one", "one with a tokenizer.json")
    return _Encoder(tokenizer, template, train_on, media).encode_all(samples)


class _Encoder:
    """Encodes samples with one tokenizer and template. What is the same for all samples is computed once."""

    def __init__(self, tokenizer: Any, source: Jinja, train_on: TrainOn, media: MediaCodec | None) -> None:
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.media = media
        self.drafters = Drafters(source, tokenizer, train_on, media is not None)
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()  # earlier calls may have left it switched on
        self.backend.no_padding()
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id
        # A tokenizer splits a text at these tokens before anything else, and tokenises the pieces independently.
        added = tokenizer.added_tokens_decoder
        self.splitting = {i for i, token in added.items() if not (token.normalized or token.single_word)}

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself puts a BOS before a text."""
        return self.bos is not None and self.tokenizer("a").input_ids[:1] == [self.bos]

    def encode_all(self, samples: Sequence[Mapping[str, Any]]) -> list[list[Encoded] | Problem]:
        """Encode samples, see the function ``encode_all``."""
        results: list[list[Encoded] | Problem] = [[] for _ in samples]
        encodings = [self.encode(sample) for sample in samples]
        # By number of the sample; None starts its encoding.
        replies: dict[int, Any] = dict.fromkeys(range(len(samples)))
        while replies:
            requests: dict[int, list[str]] = {}
            for number, reply in replies.items():
                try:
                    requests[number] = encodings[number].send(reply)
                except StopIteration as stop:
                    results[number] = stop.value
                except UserError as error:
                    results[number] = error.problems[0]
            tokens_of = self.tokens(requests.values())
            replies = {number: [tokens_of[text] for text in texts] for number, texts in requests.items()}
        return results

    def tokens(self, requests: Iterable[list[str]]) -> dict[str, Tokens]:
        """Tokenise all texts at once. No special tokens are added to those in the texts."""
        located = dict.fromkeys(text for texts in requests if isinstance(texts, LocatedTexts) for text in texts)
        others = dict.fromkeys(text for texts in requests for text in texts if text not in located)
        # The backend, because calling the tokenizer copies all fields of an encoding into lists: a tenth of the whole
        # time. And encode_batch_fast, which does not locate tokens in the text, takes a third less time.
        encodings = self.backend.encode_batch(list(located), add_special_tokens=False)
        encodings += self.backend.encode_batch_fast(list(others), add_special_tokens=False)
        texts = [*located, *others]
        return {text: (encoding.ids, encoding) for text, encoding in zip(texts, encodings, strict=True)}

    def encode(self, sample: Mapping[str, Any]) -> TokenRequests:
        """Encode a sample in the kit's form. Returns ``list[Encoded]``."""
        if "input_ids" in sample:
            ids = sample["input_ids"]
            return [Encoded(list(ids), [float(label != IGNORED) for label in sample.get("labels", ids)])]
        if "plain" in sample:
            ids = list(self.backend.encode(*sample["plain"]).ids)
            return [Encoded(ids, [1.0] * len(ids), form="plain")]
        if "text" in sample:
            return [(yield from self.encode_texts("", sample["text"]))]
        tools = sample.get("tools") or None
        kwargs = sample.get("chat_template_kwargs") or {}
        media = sample.get("media", ())
        if "messages" in sample:
            return (yield from self.encode_chat(sample["messages"], 0, tools, kwargs, media))
        prompt, completion = sample["prompt"], sample.get("completion")
        if isinstance(prompt, list):
            messages = [*prompt, *(completion or [])]
            return (yield from self.encode_chat(messages, len(prompt), tools, kwargs, media))
        if tools or kwargs:
            key = "tools" if tools else "chat_template_kwargs"
            fix = "give a template as --chat_template, which makes messages of them"
            raise UserError(key, "given for a prompt or a completion that is a string", "them for messages", fix)
        return [(yield from self.encode_texts(prompt, completion))]

    def encode_texts(self, prompt: str, completion: str | None) -> TokenRequests:
        """Encode a prompt, which may be empty, and the completion or text after it. Returns an ``Encoded``."""
        if completion is None:
            [(ids, _)] = yield [prompt]
            ids = ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]
            return Encoded(ids, [0.0] * len(ids), form="ended")
        if self.eos is None:
            found = "its tokenizer has no end-of-sequence token, so the model could not learn to stop"
            raise UserError("model_name_or_path", found, "a tokenizer with an eos_token")
        needs_newline = bool(prompt) and not prompt[-1].isspace() and not completion[:1].isspace()
        if needs_newline:
            completion = "\n" + completion
        [(ids, _)] = yield [prompt]
        tail = yield from self.continuation(prompt, completion)
        weight_of_prompt = 1.0 if self.train_on == "all" else 0.0
        weights = [weight_of_prompt] * len(ids) + [1.0] * len(tail)
        ids = ids + tail
        if self.bos is not None and ids[:1] != [self.bos]:
            ids, weights = [self.bos, *ids], [0.0, *weights]
        if ids[-1:] != [self.eos]:
            ids, weights = [*ids, self.eos], [*weights, 1.0]
        return Encoded(ids, weights, (NEWLINE_ADDED,) if needs_newline else (), form="ended")

    def encode_chat(
        self, messages: Messages, first: int, tools: Tools, kwargs: Mapping[str, Any], media: Sequence[Any] = ()
    ) -> TokenRequests:
        """Encode a conversation; answers from message number ``first`` on are supervised. Returns ``list[Encoded]``."""
        template, drafter = self.drafters.of(bool(tools), kwargs)
        drafts = drafter.drafts(messages, first, tools)
        remarks = []
        if any(template.writes_date(draft.text) for draft in drafts):
            remarks.append(FIXED_DATE)
        if len(drafts) > 1:
            remarks.append(UNROLLED)
        remarks += dict.fromkeys(remark for draft in drafts for remark in draft.remarks)
        names = [message["name"] for message in messages if message["role"] != "tool" and message.get("name")]
        if not all(name in drafts[-1].text for name in names):
            remarks.append(NO_NAMES)
        for literal in template.split_literals:
            if any(literal in draft.text for draft in drafts):
                remarks.append(f"the chat template writes {literal}, which the tokenizer splits into pieces")
        of_media: frozenset[int] = frozenset()
        if self.media:
            expanded = [self.with_placeholders(draft, media[: draft.num_media], template) for draft in drafts]
            drafts = [draft for draft, _ in expanded]
            texts = set(chain.from_iterable(of_draft for _, of_draft in expanded))
            of_media = frozenset().union(*map(self.media.ids, texts))
        samples = yield from self.encode_drafts(drafts, template)
        starts = [ids[:2] for ids, _ in samples]
        if self.bos is not None and [self.bos, self.bos] in starts:
            found = f"two BOS tokens ({self.tokenizer.bos_token}) at the start, at least one of them from the template"
            raise template.refusal(found)
        if self.adds_bos and any(ids[:1] != [self.bos] for ids in starts):
            remarks.append(NO_BOS)
        if of_media:
            samples = [
                (ids, [0.0 if i in of_media else w for i, w in zip(ids, weights, strict=True)])
                for ids, weights in samples
            ]
        encoded = [
            Encoded(ids, weights, num_media=draft.num_media if self.media else 0)
            for draft, (ids, weights) in zip(drafts, samples, strict=True)
        ]
        encoded[0] = replace(encoded[0], remarks=tuple(remarks))
        return encoded

    def with_placeholders(
        self, draft: Draft, media: Sequence[Media], template: Template
    ) -> tuple[Draft, Sequence[str]]:
        """Put the placeholders of images where the template has written its token for them. Returns them too.

        Raises ``UserError`` if the text has more or fewer such tokens than images.
        """
        assert self.media is not None
        pattern = "|".join(map(re.escape, self.media.tokens.values()))
        places = [match.span() for match in re.finditer(pattern, draft.text)]
        if draft.num_media > len(media):
            raise UserError("messages", "the character U+FDD2, which stands for an image", "a text without it")
        if len(places) != draft.num_media:
            tokens = " or ".join(self.media.tokens.values())
            found = f"{len(places)} times {tokens} for {draft.num_media} images"
            if len(places) < draft.num_media:
                raise template.refusal(f"the chat template leaves images out: {found}")
            raise UserError("messages", f"{found}: the text itself has it", f"no {tokens} in a text")
        borders = [end for _, end in places]
        starts = [start for start, _ in places]
        pieces = [draft.text[at:start] for at, start in zip([0, *borders], [*starts, None], strict=True)]
        texts = self.media.texts(media, pieces)
        text = "".join(chain.from_iterable(zip(pieces, texts, strict=False))) + pieces[-1]
        # By how much the text is longer up to each border.
        sums = [0, *accumulate(len(new) - (end - start) for new, (start, end) in zip(texts, places, strict=True))]

        def moved(at: int) -> int:
            return at + sums[bisect_right(borders, at)]

        spans = [(moved(start), moved(end), weight) for start, end, weight in draft.spans]
        return replace(draft, text=text, spans=spans), texts

    def encode_drafts(self, drafts: list[Draft], template: Template) -> TokenRequests:
        """Return ids and weights of each draft: tokenised as a whole if no token straddles a border, else in pieces."""
        wholes = yield LocatedTexts(draft.text for draft in drafts)
        weights = [[draft.rest] * len(ids) for draft, (ids, _) in zip(drafts, wholes, strict=True)]
        cuts = [
            (k, weight, cut)
            for k, (draft, whole) in enumerate(zip(drafts, wholes, strict=True))
            for (_, _, weight), cut in zip(draft.spans, self.cuts(draft, *whole), strict=True)
        ]
        # Without tokens that split the text, the text before each span is all before it: their tokens together would
        # fill the memory.
        num_before = list(accumulate(len(cut.before) for _, _, cut in cuts))
        if num_before and num_before[-1] > MAX_BEFORE:
            raise template.too_long(MAX_BEFORE)
        inexact = set()
        for _, group in groupby(zip(cuts, num_before, strict=True), lambda pair: pair[1] // AT_ONCE):
            some = [cut for cut, _ in group]
            tokens = yield [cut.before for _, _, cut in some]
            for (k, weight, cut), (ids_before, _) in zip(some, tokens, strict=True):
                start = cut.begin + len(ids_before)
                if start > cut.stop or wholes[k][0][cut.begin : start] != ids_before:
                    inexact.add(k)
                weights[k][start : cut.stop] = [weight] * (cut.stop - start)
        samples = []
        for k, (ids, _) in enumerate(wholes):
            samples.append((yield from self.encode_pieces(drafts[k])) if k in inexact else (ids, weights[k]))
        return samples

    def cuts(self, draft: Draft, ids: Ids, encoding: Any) -> list[Cut]:
        """Return where to find each span in ``ids``, the tokens of the draft's whole text."""
        splitting = [(k, *encoding.token_to_chars(k)) for k, id_ in enumerate(ids) if id_ in self.splitting]
        cuts = []
        offsets: list[tuple[int, int]] = []  # of all tokens, listed once they are needed
        after = 0  # the first token that ends after the previous span
        for start, end, _ in draft.spans:
            num_before = bisect_right(splitting, start, key=itemgetter(2))
            begin, at = splitting[num_before - 1][:2] if num_before else (0, 0)
            num_inside = bisect_left(splitting, end, key=itemgetter(1))
            if end == len(draft.text):
                stop = len(ids)
            elif num_inside and splitting[num_inside - 1][2] >= end:  # such a token may include whitespace after it
                stop = splitting[num_inside - 1][0] + 1
            else:
                offsets = offsets or encoding.offsets
                stop = after = next((k for k in range(after, len(ids)) if offsets[k][1] > end), len(ids))
                if stop < len(ids) and offsets[stop][0] < end:
                    stop = 0
            cuts.append(Cut(begin, draft.text[at:start], stop))
        return cuts

    def encode_pieces(self, draft: Draft) -> TokenRequests:
        """Return ids and weights of a draft. Its text is cut at every border of a span, each piece tokenised alone."""
        ids: Ids = []
        weights: list[float] = []
        borders = sorted({0, len(draft.text), *(border for span in draft.spans for border in span[:2])})
        for left, right in pairwise(borders):
            piece = yield from self.continuation(draft.text[:left], draft.text[left:right])
            ids += piece
            weight = next((weight for start, end, weight in draft.spans if start <= left < end), draft.rest)
            weights += [weight] * len(piece)
        return ids, weights

    def continuation(self, before: str, text: str) -> TokenRequests:
        """Return the ids of ``text`` as the continuation of ``before``. Raises ``UserError`` if they cannot be found.

        Tokenised alone, ``text`` would get a leading space from a tokenizer like SentencePiece. So it is tokenised
        after an anchor that it does not merge with, and the anchor's tokens are removed.
        """
        for anchor in (before, "\n", "a", "1", "."):
            (base, _), (joint, _) = yield [anchor, anchor + text]
            if joint[: len(base)] == base:
                return joint[len(base) :]
        found = f"the text after {before[-20:]!r} cannot be tokenised apart from it"
        raise UserError("model_name_or_path", found, "a tokenizer that goes with the text")
