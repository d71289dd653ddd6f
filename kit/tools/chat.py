"""Conversations with a model: in the terminal, or one for each line of standard input.

Promises: prompts have the tokens that an evaluation of the run gives the model; in the same precision a greedy answer
is the one that ``kit score`` generates. A damaged checkpoint is refused. Runs in one process.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from kit.config.command_line import Request
from kit.config.recipe import Recipe
from kit.config.settings.data import DataSettings
from kit.console import say, show
from kit.data.chat.template import resolve_template
from kit.data.chat.turns import Drafters
from kit.data.open import pad_id
from kit.errors import Problem, UserError
from kit.model.attention import without_cudnn_attention
from kit.model.sampling import how_to_generate
from kit.strategy.topology import Topology
from kit.strategy.weights import generating
from kit.tools.opening import Opened, open_models, plan_one_process

HELP = "/new begins a new conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer"
Message = dict[str, str]


@dataclass(frozen=True)
class Speaker:
    """A model that answers."""

    name: str  # empty if it is alone
    model: Opened  # its template is None if what is typed is the prompt
    beginning: list[Message]  # of each conversation: the system message, if there is one

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the ids after which the model answers.

        Raises:
            UserError: the template refuses the messages, or the model cannot read as many tokens.
        """
        model, tokenizer = self.model, self.model.tokenizer
        if model.template is None:
            ids = tokenizer.backend_tokenizer.encode(messages[-1]["content"], add_special_tokens=False).ids
            bos = tokenizer.bos_token_id
            ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        else:
            text = model.template.render(messages, None, add_generation_prompt=True)
            ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise UserError(Problem("the prompt", "empty", "some text"))
        if model.positions is not None and len(ids) >= model.positions:
            found = f"the conversation has {len(ids)} tokens, and the model reads {model.positions}"
            raise UserError(Problem("the prompt", found, fix="/new begins a new one"))
        return ids

    def answer(self, messages: list[Message], write: Callable[[str], None]) -> str:
        """Return the answer to ``messages``; ``write`` gets its text as it is generated, without special tokens."""
        ids = self.prompt_ids(messages)
        written: list[str] = []

        def keep(text: str) -> None:
            written.append(text)
            write(text)

        model, recipe = self.model, self.model.recipe
        room = recipe.max_new_tokens if model.positions is None else model.positions - len(ids)
        # As in an evaluation, each answer has numbers of its own to be drawn with: here the messages before it.
        numbers = [(len(messages), len(ids))]
        prepared = model.prepared
        input_ids = torch.tensor([ids], device=prepared.accelerator.device)
        with (
            torch.no_grad(),
            model.aside(),
            without_cudnn_attention(),
            generating(prepared.accelerator, prepared.model) as generate,
        ):
            generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                use_cache=True,
                pad_token_id=pad_id(model.tokenizer),
                eos_token_id=model.stops or None,
                streamer=_Streamer(model.tokenizer, keep),
                max_new_tokens=min(room, recipe.max_new_tokens),
                **how_to_generate(recipe.temperature, recipe.top_p, recipe.seed, numbers, len(ids)),
            )
        return "".join(written)


class _Streamer(TextStreamer):
    """Gives the text of an answer to a function, word by word."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def talk(request: Request, with_base: bool, is_plain: bool) -> None:
    """Open the model, and answer until the input ends.

    Raises:
        UserError: the model cannot be opened, or has no chat template.
    """
    recipe, topology = plan_one_process(request)
    speakers = list(_speakers(recipe, topology, with_base, is_plain))
    if sys.stdin.isatty():
        _in_terminal(speakers)
    else:
        for line in sys.stdin:
            if question := line.rstrip("\n"):
                _ask(speakers, [[*each.beginning, _user(question)] for each in speakers])


def _speakers(recipe: Recipe, topology: Topology, with_base: bool, is_plain: bool) -> Iterator[Speaker]:
    """Open the model, and with its base that too."""

    def template_of(opened: DataSettings, tokenizer: Any) -> Any:
        if is_plain:
            return None
        source = resolve_template(tokenizer, opened.chat_template, opened.chat_template_kwargs)
        if source is None:
            found = f"{recipe.model_name_or_path} brings none"
            fix = "--plain, and what you type is the prompt; or --chat_template NAME"
            raise UserError(Problem("chat_template", found, "a chat template", fix))
        return Drafters(source, tokenizer, "assistant").of(False, {})[0]

    beginning: list[Message] = []
    for model in open_models(recipe, topology, template_of, with_base):
        if not model.is_base and model.recipe.system_prompt:
            beginning = [{"role": "system", "content": model.recipe.system_prompt}]
        name = ("base" if model.is_base else "tuned") if with_base else ""
        yield Speaker(name, model, beginning)


def _in_terminal(speakers: list[Speaker]) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in ``input``

    say(HELP)
    conversations: list[list[Message]] = [list(each.beginning) for each in speakers]
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            show("")
            return
        if question.strip() == "/exit":
            return
        if question.strip() == "/new":
            conversations = [list(each.beginning) for each in speakers]
        elif question.strip():
            for conversation in conversations:
                conversation.append(_user(question))
            try:
                answers = _ask(speakers, conversations)
            except UserError as error:
                show(str(error))
                answers = []
            except KeyboardInterrupt:
                show("\n(ended)")
                answers = []
            for index, conversation in enumerate(conversations):
                if answers:
                    conversation.append({"role": "assistant", "content": answers[index]})
                else:
                    conversation.pop()


def _ask(speakers: list[Speaker], conversations: list[list[Message]]) -> list[str]:
    """Print the answer of each speaker to its conversation as it is generated, and return them."""
    answers = []
    for speaker, conversation in zip(speakers, conversations, strict=True):
        if speaker.name:
            show(f"{speaker.name}: ", end="")
        answers.append(speaker.answer(conversation, lambda text: show(text, end="")))
        show("")
    return answers


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
