"""Conversations with a model: in the terminal, or one for each line of standard input.

Promises: prompts have the tokens that an evaluation of the run gives the model; in the same precision a greedy answer
is the one that ``kit score`` generates. Results of tools are appended to turns as they were sampled; the
chat template writes those before the next question. A damaged checkpoint is refused. Runs in one process.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from transformers import TextStreamer

from kit.config.command_line import Request
from kit.data.chat.media_parts import MARKS
from kit.data.media import Media, MediaKind
from kit.data.open import pad_id
from kit.data.read.media_files import inspect
from kit.model.layers.attention import without_cudnn_attention
from kit.model.sampling import Sampling, sampling_arguments
from kit.rollouts.generation import text_of
from kit.rollouts.tools.tool_calls import turn_of
from kit.rollouts.tools.tool_processes import ToolFailure
from kit.strategy.weights import generating
from kit.system.console import say, show
from kit.system.errors import UserError
from kit.tools.opened import Opened, base_of, open_model, plan_one_process

HELP = "/new starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"
Message = dict[str, Any]


def prompt_ids(model: Opened, messages: list[Message], media: Sequence[Media] = ()) -> list[int]:
    """Return the ids after which ``model`` answers.

    Args:
        media: of the messages, in which each is its mark (``media_parts.MARKS``).

    Raises:
        UserError: the template refuses the messages or leaves media out.
    """
    tokenizer = model.policy.tokenizer
    if model.template is None:
        ids = tokenizer.backend_tokenizer.encode(messages[-1]["content"], add_special_tokens=False).ids
        bos = tokenizer.bos_token_id
        ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
    elif model.tools:
        ids = model.tools.turns.prompt(messages)
    else:
        text = model.template.render(messages, None, add_generation_prompt=True)
        if model.media:
            pieces = re.split("|".join(map(re.escape, model.media.tokens.values())), text)
            if len(pieces) - 1 != len(media):
                raise model.template.refusal(
                    f"{len(pieces) - 1} placeholders in the prompt for {len(media)} images and sounds"
                )
            text = "".join(chain.from_iterable(zip(pieces, [*model.media.texts(media, pieces), ""], strict=True)))
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise UserError("the prompt", "empty", "some text")
    return ids


def answer(model: Opened, ids: list[int], num_messages: int, media: Sequence[Media] = ()) -> tuple[list[int], str]:
    """Show the answer to a prompt as it is generated. Returns its ids, and its text without special tokens.

    Args:
        ids: of ``prompt_ids``, as are ``media``, with absolute paths.
        num_messages: before the answer.

    Raises:
        UserError: the model cannot read as many tokens.
    """
    recipe = model.recipe
    if model.positions is not None and len(ids) >= model.positions:
        found = f"the conversation has {len(ids)} tokens, more than max_position_embeddings {model.positions}"
        raise UserError("the prompt", found, fix="/new starts a new one")
    streamer = _Streamer(model.policy.tokenizer)
    room = recipe.max_new_tokens if model.positions is None else model.positions - len(ids)
    # As in an evaluation, each answer has numbers of its own to be drawn with: here the messages before it.
    numbers = [(num_messages, len(ids))]
    policy = model.policy
    input_ids = torch.tensor([ids], device=policy.accelerator.device)
    seen = {}
    if model.media and media:
        given = [(each, "/", f"--{each.kind}") for each in media]
        seen = model.media.generation_inputs(input_ids.cpu(), [given])
        seen = {name: tensor.to(input_ids.device) for name, tensor in seen.items()}
    with (
        torch.no_grad(),
        model.aside(),
        without_cudnn_attention(),
        generating(policy.accelerator, policy.model) as generate,
    ):
        output = generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            use_cache=True,
            pad_token_id=pad_id(model.policy.tokenizer),
            eos_token_id=model.stops or None,
            streamer=streamer,
            max_new_tokens=min(room, recipe.max_new_tokens),
            **sampling_arguments(Sampling(recipe.temperature, recipe.top_p), recipe.seed, numbers, len(ids)),
            **seen,
        )
    show("")
    return output[0, len(ids) :].tolist(), streamer.text


class _Streamer(TextStreamer):
    """Shows an answer word by word."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        show(text, end="")


class Conversation:
    """With one model, and with tools in a process of its own.

    Attributes:
        messages: of the questions that were answered, and before them.
    """

    def __init__(self, model: Opened, beginning: list[Message], row: Mapping[str, Any]) -> None:
        """Show what the environment shows first, given a row. Raises ``UserError`` if it cannot start."""
        self.model, self.messages, self._beginning, self._observation = model, beginning, beginning, ""
        self._played = model.tools.open((model.recipe.seed,), row) if model.tools else None
        if self._played:
            try:
                self._observation = self._played.session.start()
            except ToolFailure as failure:
                fix = "--row JSON gives it columns"
                raise UserError("--environment", f"reset failed: {failure}", fix=fix) from None
            if self._observation:
                show(self._observation)

    def ask(self, question: str, media: Sequence[Media]) -> list[Message]:
        """Show the answer, with tools in several turns. Returns all messages with it."""
        model, played = self.model, self._played
        if self.messages is self._beginning:
            question = "".join(MARKS[each.kind] for each in media) + question + self._observation
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = prompt_ids(model, messages, media)
        for _ in range(model.recipe.max_turns):
            written, shown = answer(model, ids, len(messages), media)
            if not (model.tools and played):
                return [*messages, {"role": "assistant", "content": shown}]
            ended, tokenizer = written[-1] in model.stops, model.policy.tokenizer
            calls, error = played.read(tokenizer.decode(ids), text_of(tokenizer, written, ended), ended)
            if not (calls or error):
                return [*messages, {"role": "assistant", "content": shown}]
            results = played.results(calls, error)
            show("\n".join(f"{each['name']} -> {each['content']}" for each in results))
            if not error:
                messages += [turn_of(calls, [each["tool_call_id"] for each in results]), *results]
            following = model.tools.turns.append(written, results)
            if following is None:
                return messages
            ids = [*ids, *written, *following]
        show(f"(max_turns {model.recipe.max_turns})")
        return messages

    def close(self) -> None:
        """End the process."""
        if self._played:
            self._played.session.close()


def talk(
    request: Request,
    with_base: bool,
    is_plain: bool,
    files: Sequence[tuple[MediaKind, str]] = (),
    row: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Open the model, and answer until the input ends.

    Args:
        files: images and sounds that stand before the first question of each conversation.
        row: for the ``reset`` of an environment.

    Raises:
        UserError: the model cannot be opened, has no chat template, no base, or does not take them; or a file
            cannot be opened.
    """
    recipe, topology = plan_one_process(request)
    media = [_inspected(*each) for each in files]
    tuned = open_model(recipe, topology, is_plain, with_base, {each.kind for each in media})
    models = [tuned, base_of(tuned)] if with_base else [tuned]
    system = tuned.recipe.system_prompt
    beginning = [{"role": "system", "content": system}] if system else []
    in_terminal = sys.stdin.isatty()
    if in_terminal and tuned.template is None:
        say("plain text: your text is the prompt; --chat_template sets a chat template")

    def begin() -> list[Conversation]:
        return [Conversation(model, beginning, row) for model in models]

    conversations = begin() if in_terminal else []
    for question in _typed() if in_terminal else (line.rstrip("\n") for line in sys.stdin):
        if not question.strip():
            continue
        if (is_new := question.strip() == "/new") or not in_terminal:
            for each in conversations:
                each.close()
            conversations = begin()
        if is_new:
            continue
        try:
            asked = _ask(conversations, question, media)
        except UserError as error:
            if not in_terminal:
                raise
            show(str(error))
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            show("\n(ended)")
        else:
            for each, messages in zip(conversations, asked, strict=True):
                each.messages = messages
    for each in conversations:
        each.close()


def _typed() -> Iterator[str]:
    """What is typed in the terminal."""
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in ``input``

    say(HELP)
    with suppress(EOFError, KeyboardInterrupt):
        while (question := input("> ")).strip() != "/exit":
            yield question
        return
    show("")


def _inspected(kind: MediaKind, file: str) -> Media:
    try:
        return inspect(kind, os.path.realpath(os.path.expanduser(file)), "/")
    except UserError as error:
        raise UserError(*(replace(problem, where=f"--{kind}", fix="") for problem in error.problems)) from None


def _ask(conversations: list[Conversation], question: str, media: Sequence[Media]) -> list[list[Message]]:
    """Print the answer in each conversation as it is generated. Returns what ``ask`` does."""
    found = []
    for name, conversation in zip(("tuned", "base"), conversations, strict=False):
        if len(conversations) > 1:
            show(f"{name}: ", end="")
        found.append(conversation.ask(question, media))
    return found
