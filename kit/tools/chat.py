"""Conversations with a model: in the terminal, or one for each line of standard input.

Promises: prompts have the tokens that an evaluation of the run gives the model; in the same precision a greedy answer
is the one that ``kit score`` generates. A damaged checkpoint is refused. Runs in one process.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer

from kit import interrupt
from kit.checkpoint.load import load_weights
from kit.config.command_line import Request
from kit.config.recipe import Recipe
from kit.console import say, show, silence_libraries
from kit.data.chat.template import resolve_template
from kit.data.chat.turns import Drafters
from kit.data.open import pad_id
from kit.errors import Problem, UserError, raise_if
from kit.model.adapter import adapters_off
from kit.model.attention import without_cudnn_attention
from kit.model.load import build_meta_model, build_model, check_model, num_positions, open_config
from kit.model.sampling import how_to_generate
from kit.model.tokenizer import open_tokenizer
from kit.run.opening import CHECKPOINT, run_of, to_open
from kit.run.record import read_run, read_stop_tokens
from kit.run.resume import verify_together
from kit.strategy.accelerator import Prepared, prepare, start
from kit.strategy.launch import forget_launcher, plan_launch
from kit.strategy.strategies import SINGLE
from kit.strategy.topology import Topology
from kit.strategy.weights import generating

if TYPE_CHECKING:
    from kit.cli.chat import Asked

HELP = "/new begins a new conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer"
Message = dict[str, str]


@dataclass(frozen=True)
class Speaker:
    """A model that answers."""

    name: str  # empty if it is alone
    prepared: Prepared
    tokenizer: Any
    template: Any  # None: what is typed is the prompt
    stops: list[int]  # ids of the tokens that end an answer
    positions: int | None  # the longest text that it can read, in tokens; None: its config sets no limit
    recipe: Recipe  # how answers are drawn, and how long they may be
    beginning: list[Message]  # of each conversation: the system message, if there is one
    aside: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it answers

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the ids after which the model answers.

        Raises:
            UserError: the template refuses the messages, or the model cannot read as many tokens.
        """
        if self.template is None:
            ids = self.tokenizer.backend_tokenizer.encode(messages[-1]["content"], add_special_tokens=False).ids
            bos = self.tokenizer.bos_token_id
            ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        else:
            text = self.template.render(messages, None, add_generation_prompt=True)
            ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise UserError(Problem("the prompt", "empty", "some text"))
        if self.positions is not None and len(ids) >= self.positions:
            found = f"the conversation has {len(ids)} tokens, and the model reads {self.positions}"
            raise UserError(Problem("the prompt", found, fix="/new begins a new one"))
        return ids

    def answer(self, messages: list[Message], write: Callable[[str], None]) -> str:
        """Return the answer to ``messages``; ``write`` gets its text as it is generated, without special tokens."""
        ids = self.prompt_ids(messages)
        written: list[str] = []

        def keep(text: str) -> None:
            written.append(text)
            write(text)

        recipe = self.recipe
        room = recipe.max_new_tokens if self.positions is None else self.positions - len(ids)
        # As in an evaluation, each answer has numbers of its own to be drawn with: here the messages before it.
        numbers = [(len(messages), len(ids))]
        prepared = self.prepared
        input_ids = torch.tensor([ids], device=prepared.accelerator.device)
        with (
            torch.no_grad(),
            self.aside(),
            without_cudnn_attention(),
            generating(prepared.accelerator, prepared.model) as generate,
        ):
            generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                use_cache=True,
                pad_token_id=pad_id(self.tokenizer),
                eos_token_id=self.stops or None,
                streamer=_Streamer(self.tokenizer, keep),
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


def talk(request: Request, asked: "Asked") -> None:
    """Open the model, and answer until the input ends.

    Raises:
        UserError: the model cannot be opened, or has no chat template.
    """
    silence_libraries()
    interrupt.raise_on_ctrl_c()
    planned = plan_launch(request)
    raise_if(planned.problems)
    topology = planned.topology
    if topology.strategy != SINGLE:
        raise UserError(Problem("config", topology.strategy.title, "one process", "--config single"))
    if topology.device_type == "cuda" and planned.config_file is None:
        topology = replace(topology, mixed_precision="bf16")
    forget_launcher(topology)
    speakers = list(_speakers(planned.recipe, topology, asked))
    if sys.stdin.isatty():
        _in_terminal(speakers)
    else:
        for line in sys.stdin:
            if question := line.rstrip("\n"):
                _ask(speakers, [[*each.beginning, _user(question)] for each in speakers])


def _speakers(recipe: Recipe, topology: Topology, asked: "Asked") -> Iterator[Speaker]:
    """Open the model, and with ``--base`` its base."""
    name = recipe.adapter_name_or_path or recipe.model_name_or_path
    run_file = run_of(name)
    opened, checkpoint = to_open(recipe)
    base: Recipe | None = None
    if asked.with_base and opened.method == "full":
        if run_file is None:
            found = f"{name} is a whole model, and not in the folder of a run that says what it was trained from"
            raise UserError(Problem("--base", found, "an adapter, or what lies in a run's folder", "leave it out"))
        run, _ = read_run(run_file)
        began_with = {"model_name_or_path": run.model_name_or_path, "model_revision": run.model_revision}
        base = recipe.model_copy(update={**began_with, "method": "full"})
    tuned = _open(opened, topology, asked, checkpoint, run_file, "tuned" if asked.with_base else "")
    yield tuned
    if base is not None:
        same = {"template": tuned.template, "beginning": tuned.beginning}
        yield replace(_open(base, topology, asked, None, run_file, "base"), **same)
    elif asked.with_base:
        model = tuned.prepared.model
        yield replace(tuned, name="base", aside=lambda: adapters_off(model))


def _open(
    recipe: Recipe, topology: Topology, asked: "Asked", checkpoint: Path | None, run_file: Path | None, name: str
) -> Speaker:
    config = open_config(recipe)
    raise_if(check_model(recipe, config, build_meta_model(recipe, config)))
    tokenizer = open_tokenizer(recipe)
    template = None
    if not asked.plain:
        source = resolve_template(tokenizer, recipe.chat_template, recipe.chat_template_kwargs)
        if source is None:
            found = f"{recipe.model_name_or_path} brings none"
            fix = "--plain, and what you type is the prompt; or --chat_template NAME"
            raise UserError(Problem("chat_template", found, "a chat template", fix))
        template = Drafters(source, tokenizer, "assistant").of(False, {})[0]
    accelerator, plan = start(recipe, topology)
    if checkpoint:
        faults = verify_together(accelerator, checkpoint)
        raise_if(Problem(CHECKPOINT, f"{checkpoint}: {fault}") for fault in faults)
    plan = replace(plan, trained_dtype=plan.compute_dtype)  # nothing is trained
    prepared = prepare(accelerator, topology, build_model(recipe, config, plan))
    if checkpoint:
        load_weights(prepared.model, checkpoint)
    prepared.model.eval()
    ends = set(read_stop_tokens(run_file).values()) if run_file else set()
    own = accelerator.unwrap_model(prepared.model).generation_config
    eos = own.eos_token_id if own else None
    ends |= {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    beginning = [{"role": "system", "content": recipe.system_prompt}] if recipe.system_prompt else []
    return Speaker(name, prepared, tokenizer, template, sorted(ends), num_positions(config), recipe, beginning)


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
