"""Write models that plain ``from_pretrained`` opens: ``final/`` of a run, an exported checkpoint, a merged adapter.

A folder has a full model or a PEFT adapter, with tokenizer, chat template and model card. It is written under a
temporary name and then renamed, so it is complete or absent.
"""

import copy
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import yaml

from kit import durable
from kit.config.recipe import Recipe
from kit.console import say
from kit.errors import TrainingError, listed
from kit.export.shards import write_weights
from kit.export.stops import describe_stops, write_stops
from kit.model.adapter import module_adapted_by
from kit.model.serving import merge_command, why_not_served
from kit.strategy.topology import ActualStrategy
from kit.strategy.weights import gather_trainable, rank_and_world, whole_state
from kit.visible import one_line

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

NO_STOPS: Mapping[str, int] = MappingProxyType({})


def save_final(
    prepared: "Prepared",
    tokenizer: Any,
    folder: Path,
    card: str,
    dtype: torch.dtype | None,
    stops: Mapping[str, int] = NO_STOPS,
) -> None:
    """Write ``folder`` as ``write_model`` does, under every strategy. Called by all ranks.

    ``folder`` is replaced by one rename. The arguments ``tokenizer``, ``card``, ``dtype`` and ``stops`` are those of
    ``write_model``.

    Raises:
        TrainingError: on the main process, if the adapter has learned nothing.
    """
    accelerator, model = prepared.accelerator, prepared.model
    plain = accelerator.unwrap_model(model)
    staging = durable.staging_of(folder)
    try:
        if accelerator.is_main_process:
            durable.make_afresh(staging)
        accelerator.wait_for_everyone()
        state = gather_trainable(accelerator, model) if hasattr(plain, "peft_config") else whole_state(model)
        write_model(staging, plain, state, tokenizer, card, dtype, stops)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            durable.sync_tree(staging)
            durable.remove(folder)
            os.replace(staging, folder)
    except BaseException:
        if accelerator.is_main_process:
            with suppress(OSError):  # the disk may be full: leave room
                durable.remove(staging)
        raise
    if accelerator.is_main_process:
        durable.sync(folder.parent)
        say(*describe_stops(stops, f"{folder.name}/"), *describe_serving(plain, folder))
    accelerator.wait_for_everyone()


def write_model(
    folder: Path,
    model: Any,
    state: dict[str, torch.Tensor],
    tokenizer: Any,
    card: str,
    dtype: torch.dtype | None,
    stops: Mapping[str, int] = NO_STOPS,
) -> None:
    """Fill ``folder`` with a full model, or with an adapter if ``model`` has one. Called by all ranks.

    Args:
        model: decides what is written. If it has an adapter, its weights are not read, and it may be on meta.
        state: by names in ``model``: of an adapter the whole trainable tensors, on the main process; of a full model
            all parameters and persistent buffers, sharded if it is.
        card: text of the model card.
        dtype: dtype of a full model's weights; None: float32. Adapters stay in float32, in which they were trained.
        stops: the tokens that end answers, with their ids; ``generation_config.json`` gets those that it lacks.

    Raises:
        TrainingError: all second matrices (lora_B) of the adapter are zero, so nothing was trained.
    """
    is_main = rank_and_world()[0] == 0
    if not hasattr(model, "peft_config"):
        config = model.config
        use_cache, own_dtype = config.use_cache, config.dtype
        config.use_cache = True
        if is_main:
            model.save_pretrained(folder, state_dict={})  # all but the weights
        write_weights(folder, model, state, dtype or torch.float32)
        if is_main:
            config.dtype = dtype or torch.float32  # `save_pretrained` puts that of the weights in training there
            config.save_pretrained(folder)
        config.use_cache = use_cache
        config.dtype = own_dtype
    elif is_main:
        check_learned(state)
        # Rows that train are in ``state``; peft would look for the base, and add what it takes for more of them.
        twin = _unwrapped_twin(model)
        twin.save_pretrained(folder, state_dict=_with_tied(twin, state), save_embedding_layers=False)
    if is_main:
        write_stops(folder, model, stops)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card + _card_for_servers(model), encoding="utf-8")
        give_usual_mode(folder)


def describe_serving(model: Any, folder: Path) -> list[str]:
    """Return a line if servers take the adapter of ``model``, written to ``folder``, only merged; else nothing."""
    reason = _why_not_served(model)
    return [f"{reason}. Merged, it is a model like any other: {merge_command(folder)}"] if reason else []


def _card_for_servers(model: Any) -> str:
    """The end of a model card that says the same."""
    reason = _why_not_served(model)
    return (
        f"\n{reason}. Merged, it is a model like any other:\n\n```bash\n{merge_command('path/to/this/folder')}\n```\n"
        if reason
        else ""
    )


def _why_not_served(model: Any) -> str:
    return why_not_served(model.peft_config["default"]) if hasattr(model, "peft_config") else ""


def give_usual_mode(folder: Path) -> None:
    """Give weight files the mode of any new file in ``folder``; safetensors makes them readable by the owner only."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # a disk without modes must not make the save fail
            path.chmod(mode)


def _unwrapped_twin(model: Any) -> Any:
    """The same adapted model on meta and without wrappers, because peft derives the saved names from its modules."""
    from peft import get_peft_model

    with torch.device("meta"):
        base = type(model.get_base_model())(model.get_base_model().config)
    return get_peft_model(base, copy.deepcopy(model.peft_config["default"]))


def _with_tied(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the other names of tied parameters, which peft expects too."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    same = {name: state[first] for first, *others in names.values() if first in state for name in others}
    return state | same


def check_learned(state: dict[str, torch.Tensor]) -> None:
    """Name the modules whose adapters are as they began: the matrix that starts at zero (lora_B) is still zero.

    Raises:
        TrainingError: all of them are, so nothing was trained or gathered.
    """
    has_learned = {module_adapted_by(name): bool(tensor.any()) for name, tensor in state.items()}
    has_learned.pop("", None)
    still = [module for module, learned in has_learned.items() if not learned]
    if len(still) == len(has_learned):
        raise TrainingError("every lora_B is zero: the adapter has learned nothing")
    if still:
        say(
            f"warning: {len(still)} of {len(has_learned)} adapters never moved, their lora_B is zero: {listed(still)}; "
            "no gradient has reached them"
        )


def model_card(
    recipe: Recipe, strategy: ActualStrategy, metrics: dict[str, float], steps: int, stops: Mapping[str, int] = NO_STOPS
) -> str:
    """Return a short model card: base, data, training settings, strategy and evaluation.

    Args:
        metrics: of the evaluation after the last step; empty if there was none.
        steps: optimiser steps done.
        stops: the tokens that end answers, but for those at which the base stops too, see ``new_stops``.
    """
    is_full = recipe.method == "full"
    library = "transformers" if is_full else "peft"
    base = recipe.model_name_or_path
    if os.path.exists(os.path.expanduser(base)):
        base = Path(base).name
    datasets = ", ".join(_code(entry.name) for entry in recipe.dataset_entries)
    items = "packs" if recipe.packing else "samples"
    about = {"library_name": library, "base_model": one_line(base)}
    front = yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=math.inf)
    lines = ["---", *front.splitlines(), "---", ""]
    lines += [f"# {_plain(Path(base).name)}, fine-tuned ({recipe.method})", ""]
    lines += [f"- data: {datasets}, {steps} steps of {recipe.global_batch_size} {items}"]
    lines += [f"- peak learning rate {recipe.peak_learning_rate:g}, {recipe.lr_scheduler_type}, seed {recipe.seed}"]
    num_processes, precision = strategy.num_processes, strategy.mixed_precision
    lines += [f"- {strategy.type.name} on {num_processes} process(es), mixed_precision {precision}"]
    lines += [f"- {_plain(name)}: {value:.6g}" for name, value in metrics.items()]
    if recipe.new_tokens:
        tokens = ", ".join(map(_code, recipe.new_tokens))
        lines += [f"- new tokens: {tokens}"]
        if not is_full:
            resize = "base.resize_token_embeddings(len(tokenizer))"
            lines += [
                f"- the class below gives the base their rows; before `PeftModel.from_pretrained`, call `{resize}`"
            ]
    if stops:
        lines += [f"- answers end with {' or '.join(map(_code, stops))}"]
    return "\n".join([*lines, "", "```python", *_code_to_open(is_full, bool(stops)), "```", ""])


def _code(text: str) -> str:
    """Text of strangers as a code span of Markdown, on one line: nothing in it is a mark or HTML."""
    text = one_line(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    space = " " if longest else ""  # else a mark at the end would belong to the fence
    return f"{'`' * (longest + 1)}{space}{text}{space}{'`' * (longest + 1)}"


def _plain(name: str) -> str:
    """A name for running text of Markdown; as code if it has other characters than names usually have."""
    return name if re.fullmatch(r"[\w./ -]+", name) else _code(name)


def _code_to_open(is_full: bool, has_stops: bool) -> list[str]:
    """Lines of Python that open the model of a card.

    Args:
        has_stops: whether there are tokens that end answers, at which the base does not stop.
    """
    library = "transformers" if is_full else "peft"
    class_name = "AutoModelForCausalLM" if is_full else "AutoPeftModelForCausalLM"
    opens_stops = has_stops and not is_full  # PEFT opens the base's generation_config.json, not the adapter's
    lines = [f"from {library} import {class_name}"]
    if opens_stops:
        lines += ["from transformers import GenerationConfig"]
    lines += [f'model = {class_name}.from_pretrained("path/to/this/folder")']
    if opens_stops:
        lines += ['model.generation_config = GenerationConfig.from_pretrained("path/to/this/folder")  # where it stops']
    return lines
