"""Samples to token ids and a supervision mask. Pure: a tokenizer is passed in, nothing is read but template files.

Promises:

- The mask is found by position in the rendered text, never by comparing token ids.
- The tokens before a supervised span are those of the prompt tokenised alone, as at inference: where a merge would
  straddle the border, the text is cut there. (After such a cut an earlier answer keeps its own tokens.)
- An assistant turn is supervised from the end of the generation prompt to its end-of-turn token, and no further.
- One BOS, never two: a chat template decides alone; prompt + completion and text get one if the tokenizer has it.
- A template whose renderings do not fit together is refused, with the reason.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from kit.errors import Problem, UserError, did_you_mean

TEMPLATES = Path(__file__).parent / "templates"
# What a tokenizer must hold as single tokens for each of our templates.
REQUIRED_TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["bos_token", "<start_of_turn>", "<end_of_turn>"],
    "llama2": ["bos_token", "eos_token"],
    "llama3": ["bos_token", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["bos_token", "eos_token", "[INST]", "[/INST]"],
    "phi3": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "zephyr": ["eos_token"],
}
NEWLINE_ADDED = "a newline was put between a prompt and a completion that would have run together"
NO_END_OF_TURN = "the chat template ends an answer without a special token, so nothing teaches the model to stop"

Messages = list[dict[str, Any]]
T = TypeVar("T")
Span = tuple[int, int]  # characters of the rendered text, or tokens: [start, end)


@dataclass(frozen=True, slots=True)
class Encoded:
    """``input_ids`` and ``mask`` (1 = supervised) have the same length; ``remarks`` are worth telling the user."""

    input_ids: list[int]
    mask: list[int]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    text: str
    spans: list[Span]
    is_plain: bool  # BOS and EOS are ours to add
    remarks: tuple[str, ...] = ()


class _EndOfTurn:
    """Where an answer ends: patterns over the tokenizer's added tokens, such as ``<|im_end|>``."""

    def __init__(self, tokenizer: Any) -> None:
        texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
        token = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"
        self.next = re.compile(rf"\s*(?:{token})")  # to match right after an answer
        self.last = re.compile(rf"({token})\s*\Z")  # to search at the end of a rendered turn


def resolve_template(tokenizer: Any, name_or_file: str | None) -> str | None:
    """The Jinja text of a named template or a file; None gives the tokenizer's own, if it has one.

    Raises ``UserError`` for an unknown name, a template that does not compile, and a named template whose special
    tokens the tokenizer would split.
    """
    if name_or_file is None:
        try:
            return tokenizer.get_chat_template() if tokenizer.chat_template else None
        except ValueError as error:  # several named templates, none of them the default
            raise UserError(Problem("chat_template", str(error).splitlines()[0], "a name or a file")) from None
    if name_or_file in REQUIRED_TOKENS:
        missing = _missing_tokens(tokenizer, name_or_file)
        if missing:
            found = f"{name_or_file!r} needs {', '.join(missing)}, which the tokenizer would split into pieces"
            raise UserError(Problem("chat_template", found, "a tokenizer that has them, or " + _fitting(tokenizer)))
        return (TEMPLATES / f"{name_or_file}.jinja").read_text(encoding="utf-8")
    if not os.path.isfile(name_or_file):  # of a name too long for a file, Path.is_file() raises OSError
        expected = f"a file, or one of {', '.join(REQUIRED_TOKENS)}"
        if "{%" in name_or_file or "{{" in name_or_file:
            raise UserError(Problem("chat_template", "the template itself", expected, "put the template in a file"))
        found = f"no template {name_or_file[:80]!r}"
        raise UserError(Problem("chat_template", found, expected, did_you_mean(name_or_file, REQUIRED_TOKENS)))
    try:
        template = Path(name_or_file).read_text(encoding="utf-8")
        render_jinja_template([[]], chat_template=template)  # compiles it
    except jinja2.TemplateSyntaxError as error:
        raise UserError(Problem(f"{name_or_file}:{error.lineno}", f"not a Jinja template ({error.message})")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(name_or_file, f"cannot be read ({error})", "a UTF-8 text file")) from None
    except Exception:  # no conversation is empty: what a template says of one is no fault of its own
        pass
    return template


def _missing_tokens(tokenizer: Any, name: str) -> list[str]:
    missing = []
    for token in REQUIRED_TOKENS[name]:
        text = getattr(tokenizer, token) if token in ("bos_token", "eos_token") else token
        if text is None or len(tokenizer(text, add_special_tokens=False).input_ids) != 1:
            missing.append(token)
    return missing


def _fitting(tokenizer: Any) -> str:
    names = [name for name in REQUIRED_TOKENS if not _missing_tokens(tokenizer, name)]
    return f"--chat_template {' | '.join(names)}, which fit this one" if names else "a template file of your own"


def encode(sample: Mapping[str, Any], tokenizer: Any, template: str | None, prompts_as_chat: bool = False) -> Encoded:
    """One sample that ``check_sample`` finds nothing wrong with; see ``encode_all``. Raises ``UserError``."""
    result = encode_all([sample], tokenizer, template, prompts_as_chat)[0]
    if isinstance(result, Problem):
        raise UserError(result)
    return result


def encode_all(
    samples: Sequence[Mapping[str, Any]], tokenizer: Any, template: str | None, prompts_as_chat: bool = False
) -> list[Encoded | Problem]:
    """Encode checked samples; many at a time is faster. A sample that must be refused gives its ``Problem``.

    - ``messages``: every assistant turn is supervised.
    - ``prompt`` and ``completion``: as lists of messages only the completion's assistant turns are supervised. As
      texts: BOS + prompt + completion + EOS, completion and EOS supervised. The texts are kept as they are, but if
      neither side of the border is whitespace a newline opens the *completion*: the model learns to write it, so at
      inference the prompt is exactly the user's own text. With ``prompts_as_chat`` the two texts are a user and an
      assistant message instead.
    - ``text``: BOS + text + EOS, all supervised.
    """
    if not tokenizer.is_fast:
        raise UserError(Problem("model_name_or_path", "its tokenizer is a slow one", "one with a tokenizer.json"))
    end_of_turn = _EndOfTurn(tokenizer)
    drafts = [_or_problem(_draft, sample, tokenizer, template, prompts_as_chat, end_of_turn) for sample in samples]
    accepted = [draft for draft in drafts if isinstance(draft, _Draft)]
    wholes = iter(_tokens(tokenizer, [draft.text for draft in accepted]))
    heads = iter(_tokens(tokenizer, [draft.text[:start] for draft in accepted for start, _ in draft.spans]))
    results: list[Encoded | Problem] = []
    for draft in drafts:
        if isinstance(draft, Problem):
            results.append(draft)
        else:
            heads_of_draft = [next(heads)[0] for _ in draft.spans]
            results.append(_or_problem(_encode, draft, tokenizer, next(wholes), heads_of_draft))
    return results


def _or_problem(function: Callable[..., T], *arguments: Any) -> T | Problem:
    try:
        return function(*arguments)
    except UserError as error:
        return error.problems[0]


def _refusal(found: str, tokenizer: Any) -> UserError:
    return UserError(Problem("chat_template", found, "a template that fits: " + _fitting(tokenizer)))


def _tokens(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
    """Ids of each text, and the characters each token stands for. No special tokens but those in the text."""
    if not texts:
        return []
    batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(zip(batch.input_ids, batch.offset_mapping, strict=True))


def _draft(
    sample: Mapping[str, Any], tokenizer: Any, template: str | None, prompts_as_chat: bool, end_of_turn: _EndOfTurn
) -> _Draft:
    """The text of a sample, and the characters of it that are supervised."""
    if "messages" in sample:
        return _draft_chat(sample["messages"], 0, tokenizer, template, end_of_turn)
    if "text" in sample:
        return _draft_plain("", sample["text"], tokenizer)
    prompt, completion = sample["prompt"], sample["completion"]
    if isinstance(prompt, list):
        return _draft_chat(prompt + completion, len(prompt), tokenizer, template, end_of_turn)
    if prompts_as_chat:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return _draft_chat(messages, 0, tokenizer, template, end_of_turn)
    return _draft_plain(prompt, completion, tokenizer)


def _draft_plain(prompt: str, completion: str, tokenizer: Any) -> _Draft:
    if tokenizer.eos_token_id is None:
        found = "its tokenizer has no end-of-sequence token, so the model could not learn to stop"
        raise UserError(Problem("model_name_or_path", found, "a tokenizer with an eos_token"))
    glued = bool(prompt) and not prompt[-1].isspace() and not completion[0].isspace()
    text = prompt + "\n" * glued + completion
    return _Draft(text, [(len(prompt), len(text))], True, (NEWLINE_ADDED,) * glued)


def _draft_chat(
    messages: Messages, first: int, tokenizer: Any, template: str | None, end_of_turn: _EndOfTurn
) -> _Draft:
    """Supervise the assistant turns from message number ``first`` on."""
    if template is None:
        raise _refusal("the tokenizer has no chat template of its own", tokenizer)
    # Arrow fills absent keys with null, which a template that tests `is defined` would take for a value.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    while messages[-1]["role"] != "assistant":  # nothing after the last answer is ever learned from
        messages.pop()

    def render(num_messages: int, **options: Any) -> tuple[str, list[Span]]:
        options |= tokenizer.special_tokens_map
        try:
            rendered: Any = render_jinja_template([messages[:num_messages]], chat_template=template, **options)
        except Exception as error:  # a template is a program: it may fail in any way
            raise _refusal(f"the template fails ({error})", tokenizer) from None
        texts, blocks = rendered  # blocks: one list per text, or none at all
        return texts[0], blocks[0] if blocks else []

    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    prompts = {i: render(i, add_generation_prompt=True)[0] for i in answers}
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        text, blocks = render(len(messages), return_assistant_tokens_mask=True)
        starts = [len(prompt) for prompt in prompts.values() if text.startswith(prompt)]
        if first:  # answers in the prompt are marked too, but not ours to teach
            blocks = [block for block in blocks if starts and block[1] > starts[0]]
        # Some templates mark the header too, which at inference is part of the generation prompt.
        blocks = [(max([start, *(s for s in starts if start < s < end)]), end) for start, end in blocks]
        spans = _end_blocks(text, blocks, end_of_turn)
        if not spans:
            raise _refusal("its {% generation %} blocks mark nothing in this conversation", tokenizer)
    else:
        text = render(len(messages))[0]
        spans = []
        for i, prompt in prompts.items():
            if not text.startswith(prompt):
                reason = f"messages[{i}]: the text before the answer differs from the prompt at inference"
                raise _refusal(reason + _first_difference(text, prompt), tokenizer)
            # As a rule the answer stands as written after the generation prompt, and a special token ends it.
            answer = messages[i]["content"].strip()
            start = len(prompt)
            at = text.find(answer, start)
            usual = end_of_turn.next.match(text, at + len(answer)) if not text[start:at].strip() else None
            if usual:
                spans.append((start, usual.end()))
                continue
            upto = render(i + 1)[0]
            if not text.startswith(upto):
                reason = f"messages[{i}]: the answer is rendered differently once more messages follow"
                raise _refusal(reason + _first_difference(text, upto), tokenizer)
            spans += _end_blocks(upto, [(start, len(upto))], end_of_turn)
    stops = all(end_of_turn.last.search(text[start:end]) for start, end in spans)
    return _Draft(text, spans, False, () if stops else (NO_END_OF_TURN,))


def _end_blocks(text: str, blocks: list[Span], end_of_turn: _EndOfTurn) -> list[Span]:
    """Leave whitespace after an end-of-turn token out; take the token in where the template left it outside."""
    outside = end_of_turn.next.match(text, blocks[-1][1]) if blocks else None
    spans = []
    for start, end in blocks:
        tail = end_of_turn.last.search(text[start:end])
        if tail:
            end = start + tail.end(1)
        elif outside and text.startswith(outside.group(), end):
            end += len(outside.group())
        spans.append((start, end))
    return spans


def _first_difference(text: str, part: str) -> str:
    at = next((k for k, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part)))
    return f" ({text[at : at + 20]!r} instead of {part[at : at + 20]!r})"


def _encode(draft: _Draft, tokenizer: Any, whole: tuple[list[int], list[Span]], heads: list[list[int]]) -> Encoded:
    """Ids of the whole text where its tokens respect every border, of the pieces where one straddles a border."""
    ids, offsets = whole
    mask = [0] * len(ids)
    for (_, end), head in zip(draft.spans, heads, strict=True):
        stop = next((k for k, offset in enumerate(offsets) if offset[1] > end), len(ids))
        straddles = stop < len(ids) and offsets[stop][0] < end
        if straddles or ids[: len(head)] != head:
            ids, mask = _encode_pieces(draft, tokenizer)
            break
        mask[len(head) : stop] = [1] * (stop - len(head))
    if draft.is_plain:
        if tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
            ids, mask = [tokenizer.bos_token_id, *ids], [0, *mask]
        if ids[-1] != tokenizer.eos_token_id:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
    return Encoded(ids, mask, draft.remarks)


def _encode_pieces(draft: _Draft, tokenizer: Any) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    borders = sorted({0, len(draft.text), *(border for span in draft.spans for border in span)})
    for left, right in pairwise(borders):
        piece = _continuation(tokenizer, draft.text[:left], draft.text[left:right])
        ids += piece
        mask += [int(any(start <= left < end for start, end in draft.spans))] * len(piece)
    return ids, mask


def _continuation(tokenizer: Any, before: str, text: str) -> list[int]:
    """Ids of ``text`` as the continuation of ``before``.

    Alone, a SentencePiece-like tokenizer would give it a leading space. So it is tokenised after something that it
    does not merge with, and that is then taken off.
    """
    for anchor in (before, "\n", "a", "1", "."):
        (base, _), (joint, _) = _tokens(tokenizer, [anchor, anchor + text])
        if joint[: len(base)] == base:
            return joint[len(base) :]
    raise _refusal(f"the text after {before[-20:]!r} cannot be tokenised apart from it", tokenizer)
