"""A model opened in one process to answer: of a run, or any other; and beside it its base.

Promises: a damaged checkpoint is refused, and all that needs no weights is checked before they are read.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit import interrupt
from kit.checkpoint.load import load_weights
from kit.config.command_line import Request
from kit.config.recipe import Recipe
from kit.config.settings.data import DataSettings
from kit.console import silence_libraries
from kit.errors import Problem, UserError, raise_if
from kit.model.adapter import adapters_off
from kit.model.load import build_meta_model, build_model, check_model, num_positions, open_config
from kit.model.tokenizer import open_tokenizer
from kit.run.opening import CHECKPOINT, precision_of, run_of, to_open
from kit.run.record import read_run, read_stop_tokens
from kit.run.resume import verify_together
from kit.strategy.accelerator import Prepared, prepare, start
from kit.strategy.launch import forget_launcher, plan_launch
from kit.strategy.strategies import SINGLE
from kit.strategy.topology import Precision, Topology


@dataclass(frozen=True)
class Opened:
    """A model that answers."""

    name: str  # as it was given; of a base, what it is opened from
    is_base: bool
    prepared: Prepared
    tokenizer: Any
    template: Any  # what ``template_of`` returned
    stops: list[int]  # ids of the tokens that end an answer
    positions: int | None  # the longest text that it can read, in tokens; None: its config sets no limit
    recipe: Recipe
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
        raise UserError(Problem("config", topology.strategy.title, "one process", "--config single"))
    if planned.config_file is None:
        usual: Precision = "bf16" if topology.device_type == "cuda" else topology.mixed_precision
        name = planned.recipe.adapter_name_or_path or planned.recipe.model_name_or_path
        topology = replace(topology, mixed_precision=precision_of(name, usual))
    forget_launcher(topology)
    return planned.recipe, topology


def open_models(
    recipe: Recipe, topology: Topology, template_of: Callable[[DataSettings, Any], Any], with_base: bool
) -> Iterator[Opened]:
    """Open the model that a recipe names, and with ``with_base`` its base, which gets the same template.

    Args:
        template_of: makes what ``Opened.template`` holds of the recipe and the tokenizer, before weights are read.

    Raises:
        UserError: it cannot be opened, or has no base.
    """
    name = recipe.adapter_name_or_path or recipe.model_name_or_path
    run_file = run_of(name)
    opened, checkpoint = to_open(recipe)
    base: Recipe | None = None
    if with_base and opened.method == "full":
        if run_file is None:
            found = f"{name} is a whole model, and not in the folder of a run that says what it was trained from"
            raise UserError(Problem("--base", found, "an adapter, or what lies in a run's folder", "leave it out"))
        run, _ = read_run(run_file)
        began_with = {"model_name_or_path": run.model_name_or_path, "model_revision": run.model_revision}
        base = recipe.model_copy(update={**began_with, "method": "full"})
    tuned = _open(name, opened, topology, template_of, checkpoint, run_file)
    yield tuned
    if base is not None:
        of_base = _open(base.model_name_or_path, base, topology, lambda *_: tuned.template, None, run_file)
        yield replace(of_base, is_base=True)
    elif with_base:
        model = tuned.prepared.model
        yield replace(tuned, name=opened.model_name_or_path, is_base=True, aside=lambda: adapters_off(model))


def _open(
    name: str,
    recipe: Recipe,
    topology: Topology,
    template_of: Callable[[DataSettings, Any], Any],
    checkpoint: Path | None,
    run_file: Path | None,
) -> Opened:
    config = open_config(recipe)
    raise_if(check_model(recipe, config, build_meta_model(recipe, config)))
    tokenizer = open_tokenizer(recipe)
    template = template_of(recipe, tokenizer)
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
    return Opened(name, False, prepared, tokenizer, template, sorted(ends), num_positions(config), recipe)
