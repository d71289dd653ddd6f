"""What a run reads: its model, its data, and the hub where one of them is there. No weight is read, and few rows."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub import constants, get_token

from kit.config.recipe import Recipe
from kit.console import silence_libraries
from kit.data.open import open_data, stop_ids
from kit.data.read.hub import ask_hub
from kit.data.read.sources import hub_id
from kit.data.samples.dataset import open_datasets
from kit.errors import Problem, Problems, UserError
from kit.hub import cached, not_cached
from kit.model.adapter import attach_adapter
from kit.model.four_bit import quantised_on_meta
from kit.model.load import build_meta_model, check_model, open_config
from kit.model.reach import freeze_unreached_parts
from kit.model.token_rows import num_rows
from kit.model.tokenizer import open_tokenizer
from kit.model.untrained import check_stop_tokens
from kit.strategy.accelerator import check_strategy, layer_classes
from kit.strategy.topology import Topology
from kit.tools.doctor.result import Result, of_problems, ok


@dataclass
class OpenedModel:
    """The model as far as it could be opened."""

    config: Any = None
    meta_model: Any = None  # modules and shapes, no weights
    adapted: Any = None  # the same with adapters, and quantised if the run quantises it


def check_model_opens(recipe: Recipe, opened: OpenedModel) -> Result:
    """Open the model's config and build it without weights into ``opened``; fail with all that is wrong with it."""
    silence_libraries()
    opened.config = open_config(recipe)
    opened.meta_model = build_meta_model(recipe, opened.config, recipe.packing)
    problems = check_model(
        recipe,
        opened.config,
        opened.meta_model,
        max_length=recipe.max_length,
        packing=recipe.packing,
        router_aux_loss_coef=recipe.router_aux_loss_coef,
    )
    number = sum(parameter.numel() for parameter in opened.meta_model.parameters())
    if not problems:
        adapted = copy.deepcopy(opened.meta_model)
        adapted = quantised_on_meta(adapted) if recipe.method == "qlora" else adapted
        opened.adapted = attach_adapter(adapted, recipe)
        freeze_unreached_parts(adapted)
    found = f"{recipe.model_name_or_path}: {type(opened.meta_model).__name__}, {number:,} parameters"
    return of_problems("model", problems, found)


def check_wrap_class(topology: Topology, meta_model: Any) -> Result:
    """Fail if the layers that the config shards are not in the model, or cannot be sharded apart."""
    if not topology.strategy.shards:
        return ok("wrap class", "nothing is sharded")
    problems = check_strategy(topology, meta_model)
    classes = layer_classes(topology, meta_model)
    count = sum(type(module).__name__ in classes for module in meta_model.modules())
    return of_problems("wrap class", problems, f"{count} x {'/'.join(classes)}")


def check_data(recipe: Recipe, opened: OpenedModel) -> Result:
    """Fail if a data set is not found, the hub refuses it, or the run would refuse its columns or first rows.

    Makes one short request for each data set on the hub, whose rows are not looked at. The token that ends the answers
    must be one that this run can learn to write, as in the run.
    """
    problems = Problems()
    local: list[str] = []
    remote: list[str] = []
    for flag, entries in (("dataset", recipe.dataset_entries), ("eval_dataset", recipe.eval_dataset_entries)):
        for entry in entries:
            with problems.caught():
                name = hub_id(entry.path, entry.split or "", flag)
                if name is None:
                    local.append(entry.path)
                    continue
                remote.append(entry.path)
                if not constants.HF_HUB_OFFLINE:
                    ask_hub(name, flag, entry.revision)
                elif name not in cached("dataset"):
                    raise UserError(not_cached(f"no file or folder {name!r}", name, "dataset", flag))
    if not problems and not remote and opened.meta_model is not None:
        with problems.caught():
            problems += _problems_of_first_rows(recipe, opened.meta_model)
    where = "the cache (offline)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    where += " with a token" if get_token() else ", without a token"
    found = []
    if local:
        found.append(", ".join(dict.fromkeys(local)))
    if remote:
        found.append(f"{', '.join(dict.fromkeys(remote))} from {where}")
    return of_problems("data", problems, "; ".join(found))


def _problems_of_first_rows(recipe: Recipe, meta_model: Any) -> list[Problem]:
    """What a run finds wrong with the columns and the first rows of its data, by the checks that a stream makes first.

    Raises:
        UserError: with what is wrong, before the token that ends the answers is known.
    """
    datasets = open_datasets(
        recipe.dataset_entries, recipe.eval_dataset_entries, recipe.streaming, recipe.declared.rows
    )
    tokenizer = open_tokenizer(recipe)
    streamed = recipe.model_copy(update={"streaming": True})
    data = open_data(
        streamed,
        [replace(dataset, is_evaluation=False) for dataset in datasets],
        tokenizer,
        num_rows(meta_model),
        eval_settings=recipe,
        seed=recipe.seed,
        global_batch_size=recipe.global_batch_size,
        wanted=recipe.declared.rows,
    )
    return check_stop_tokens(recipe, meta_model, tokenizer, stop_ids(data, tokenizer), f"{recipe.output_dir}/final")
