"""Conversations with a model: in the terminal, or one for each line of standard input.

Promises: prompts have the tokens that an evaluation of the run gives the model; in the same precision a greedy answer
is the one that ``kit score`` generates. A damaged checkpoint is refused. Runs in one process.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from transformers import TextStreamer

from kit.config.command_line import Request
from kit.data.chat.image_parts import IMAGE
from kit.data.open import pad_id
from kit.data.read.image_files import Image, inspect
from kit.model.layers.attention import without_cudnn_attention
from kit.model.sampling import Sampling, sampling_arguments
from kit.strategy.weights import generating
from kit.system.console import say, show
from kit.system.errors import UserError
from kit.tools.opened import Opened, base_of, open_model, plan_one_process

HELP = "/new starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"
Message = dict[str, str]


def prompt_ids(model: Opened, messages: list[Message], pictures: Sequence[Image] = ()) -> list[int]:
    """Return the ids after which ``model`` answers.

    Args:
        pictures: of the messages, in which each is the character ``IMAGE``.

    Raises:
        UserError: the template refuses the messages or leaves pictures out, or the model cannot read as many tokens.
    """
    tokenizer = model.policy.tokenizer
    if model.template is None:
        ids = tokenizer.backend_tokenizer.encode(messages[-1]["content"], add_special_tokens=False).ids
        bos = tokenizer.bos_token_id
        ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
    else:
        text = model.template.render(messages, None, add_generation_prompt=True)
        if model.images:
            pieces = text.split(model.images.token)
            if len(pieces) - 1 != len(pictures):
                raise model.template.refusal(
                    f"{len(pieces) - 1} image placeholders in the prompt for {len(pictures)} images"
                )
            of_pictures = [model.images.of(picture.height, picture.width) for picture in pictures]
            text = "".join(chain.from_iterable(zip(pieces, [*of_pictures, ""], strict=True)))
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise UserError("the prompt", "empty", "some text")
    if model.positions is not None and len(ids) >= model.positions:
        found = f"the conversation has {len(ids)} tokens, more than max_position_embeddings {model.positions}"
        raise UserError("the prompt", found, fix="/new starts a new one")
    return ids


def answer(model: Opened, messages: list[Message], pictures: Sequence[Image] = ()) -> str:
    """Show the answer to ``messages`` as it is generated, and return its text, without special tokens.

    ``pictures`` are those of ``prompt_ids``, with absolute paths.
    """
    ids, recipe = prompt_ids(model, messages, pictures), model.recipe
    streamer = _Streamer(model.policy.tokenizer)
    room = recipe.max_new_tokens if model.positions is None else model.positions - len(ids)
    # As in an evaluation, each answer has numbers of its own to be drawn with: here the messages before it.
    numbers = [(len(messages), len(ids))]
    policy = model.policy
    input_ids = torch.tensor([ids], device=policy.accelerator.device)
    seen = {}
    if model.images and pictures:
        seen = model.images.generation_inputs(input_ids.cpu(), [[(each, "/", "--image") for each in pictures]])
        seen = {name: tensor.to(input_ids.device) for name, tensor in seen.items()}
    with (
        torch.no_grad(),
        model.aside(),
        without_cudnn_attention(),
        generating(policy.accelerator, policy.model) as generate,
    ):
        generate(
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
    return streamer.text


class _Streamer(TextStreamer):
    """Shows an answer word by word."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        show(text, end="")


def talk(request: Request, with_base: bool, is_plain: bool, image_files: Sequence[str] = ()) -> None:
    """Open the model, and answer until the input ends.

    Args:
        image_files: pictures that stand before the first question of each conversation.

    Raises:
        UserError: the model cannot be opened, has no chat template, no base, or reads no images; or a picture cannot be
            opened.
    """
    recipe, topology = plan_one_process(request)
    pictures = [_inspected(file) for file in image_files]
    tuned = open_model(recipe, topology, is_plain, with_base, bool(pictures))
    models = [tuned, base_of(tuned)] if with_base else [tuned]
    system = tuned.recipe.system_prompt
    beginning = [{"role": "system", "content": system}] if system else []
    in_terminal = sys.stdin.isatty()
    if in_terminal and tuned.template is None:
        say("plain text: your text is the prompt; --chat_template sets a chat template")
    conversations = [beginning] * len(models)
    for question in _typed() if in_terminal else (line.rstrip("\n") for line in sys.stdin):
        is_new = question.strip() == "/new"
        if is_new or not in_terminal:
            conversations = [beginning] * len(models)
        if is_new or not question.strip():
            continue
        is_first = len(conversations[0]) == len(beginning)
        text = (IMAGE * len(pictures) if is_first else "") + question
        asked = [[*conversation, {"role": "user", "content": text}] for conversation in conversations]
        try:
            answers = _ask(models, asked, pictures)
        except UserError as error:
            if not in_terminal:
                raise
            show(str(error))
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            show("\n(ended)")
        else:
            conversations = [
                [*conversation, {"role": "assistant", "content": text}]
                for conversation, text in zip(asked, answers, strict=True)
            ]


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


def _inspected(file: str) -> Image:
    try:
        return inspect(os.path.realpath(os.path.expanduser(file)), "/")
    except UserError as error:
        raise UserError(*(replace(problem, where="--image", fix="") for problem in error.problems)) from None


def _ask(models: list[Opened], conversations: list[list[Message]], pictures: Sequence[Image]) -> list[str]:
    """Print the answer of each model to its conversation as it is generated, and return them."""
    answers = []
    for name, model, conversation in zip(("tuned", "base"), models, conversations, strict=False):
        if len(models) > 1:
            show(f"{name}: ", end="")
        answers.append(answer(model, conversation, pictures))
        show("")
    return answers
