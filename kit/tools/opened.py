"""A model opened in one process for inference: of a run, or any other; and the base of an adapter.

Promises: a damaged checkpoint is refused, and all that needs no weights is checked before they are read.
"""

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from kit.config.command_line import Request
from kit.config.recipe import Recipe
from kit.data.chat.template import Jinja, Template, resolve_template
from kit.data.chat.turns import Drafters
from kit.data.media import MediaKind
from kit.data.samples.rows import no_media_of
from kit.model.adapters.adapter import adapters_off
from kit.model.build import build_meta_model, check_model, num_positions, open_config
from kit.model.media.codec import ModelMedia
from kit.model.media.open import open_media
from kit.model.pretrained.heads import head_of
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.rollouts.tools.tool_environment import Tools
from kit.run.model_source import CHECKPOINT, precision_of, run_of, to_open
from kit.run.record import read_texts
from kit.run.resume import verify_together
from kit.strategy.launch.launch import forget_launcher, plan_launch
from kit.strategy.precision import supported_precision
from kit.strategy.strategies import SINGLE
from kit.strategy.topology import Precision, Topology
from kit.system import interrupt
from kit.system.console import show_error, silence_libraries
from kit.system.errors import Problem, UserError, raise_if
from kit.train.policy import Policy, build_policy
from kit.train.session import Session


@dataclass(frozen=True)
class Opened:
    """A model opened for generation."""

    policy: Policy
    template: Template | None  # None: what is typed is the prompt
    stops: list[int]  # ids of the tokens that end an answer
    positions: int | None  # the longest text that it can read, in tokens; None: its config sets no limit
    recipe: Recipe
    media: ModelMedia | None = None  # None: it reads none, or none was asked for
    tools: Tools | None = None
    aside: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it answers


def plan_one_process(request: Request) -> tuple[Recipe, Topology]:
    """Return the recipe and the topology of a command that answers in one process.

    Raises:
        UserError: the request has problems, or its config is for several processes.
    """
    silence_libraries()
    interrupt.raise_on_ctrl_c()
    planned = plan_launch(request)
    raise_if(planned.problems)
    topology = planned.topology
    if topology.strategy != SINGLE:
        raise UserError("config", topology.strategy.title, "one process", "--config single")
    if planned.config_file is None:
        usual: Precision = "bf16" if topology.device_type == "cuda" else topology.mixed_precision
        name = planned.recipe.adapter_name_or_path or planned.recipe.model_name_or_path
        topology, lines = supported_precision(replace(topology, mixed_precision=precision_of(name, usual)))
        for line in lines:
            show_error(line)
    forget_launcher(topology)
    return planned.recipe, topology


def open_model(
    recipe: Recipe, topology: Topology, is_plain: bool, with_base: bool, media_kinds: Set[MediaKind] = frozenset()
) -> Opened:
    """Open the model that a recipe names.

    Args:
        is_plain: without a chat template, as for a run on plain texts.
        with_base: ``base_of`` will be asked for.
        media_kinds: what it must read beside text.

    Raises:
        UserError: it cannot be opened, needs a chat template and has none, is no adapter and so has no base, or does
            not read a kind of ``media_kinds``.
    """
    texts = read_texts(run_of(recipe.adapter_name_or_path or recipe.model_name_or_path))
    is_plain |= texts.form != "chat" and not (media_kinds or recipe.chat_template or recipe.has_tools)
    recipe, checkpoint = to_open(recipe)
    if with_base and recipe.method == "full":
        raise UserError("--base", "this is a full model, not an adapter: it has no base", "an adapter", "leave it out")
    config = open_config(recipe)
    if (head := head_of(config)) != "lm":
        found = f"a model with a head for {head}, which does not generate"
        raise UserError("model_name_or_path", found, "a language model", "`kit score` measures it")
    meta_model = build_meta_model(recipe, config)
    raise_if(check_model(recipe, config, meta_model))
    tokenizer = open_tokenizer(recipe)
    try:
        media = open_media(recipe, recipe, config, meta_model, tokenizer) if media_kinds else None
    except UserError as error:
        raise UserError(*(no_media_of(kind, error.problems[0]) for kind in media_kinds)) from None
    if media:
        raise_if([problem for kind, problem in media.problems.items() if kind in media_kinds])
    source = None if is_plain else _template_of(recipe, tokenizer)
    template = Drafters(source, tokenizer, "assistant", media is not None).of(False, {})[0] if source else None
    tools = Tools(recipe, source, tokenizer) if source and recipe.has_tools else None
    session = Session(recipe, topology)
    if checkpoint:
        faults = verify_together(session.accelerator, checkpoint)
        raise_if(Problem(CHECKPOINT, f"{checkpoint}: {fault}") for fault in faults)
    session.load_plan = replace(session.load_plan, trained_dtype=session.load_plan.compute_dtype)  # nothing is trained
    policy = build_policy(session, recipe, config, tokenizer, weights=checkpoint)
    policy.model.eval()
    ends = set(texts.stop_tokens.values())
    own = policy.accelerator.unwrap_model(policy.model).generation_config
    eos = own.eos_token_id if own else None
    ends |= {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    ends |= {tools.turns.end} if tools else set()
    return Opened(policy, template, sorted(ends), num_positions(config), recipe, media, tools)


def base_of(tuned: Opened) -> Opened:
    """Return the base of an adapter, with its template."""
    return replace(tuned, aside=lambda: adapters_off(tuned.policy.model))


def _template_of(recipe: Recipe, tokenizer: Any) -> Jinja:
    source = resolve_template(tokenizer, recipe.chat_template, recipe.chat_template_kwargs)
    if source is None:
        fix = "--plain, which sends your text as the prompt; or --chat_template NAME"
        found = f"{recipe.model_name_or_path} has none"
        raise UserError("chat_template", found, "a chat template", fix)
    return source
