"""What a run reads: its model, its data sets, and the hub where one of them is there. No weight and no row is read."""

import copy
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants, get_token

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.console import silence_libraries
from kit.data.read.hub import ask_hub
from kit.data.read.sources import hub_id
from kit.errors import Problems, UserError
from kit.hub import cached, not_cached
from kit.model.adapter import attach_adapter
from kit.model.four_bit import quantised_on_meta
from kit.model.load import build_meta_model, check_model, open_config
from kit.model.reach import freeze_unreached_parts
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


def check_data(datasets: list[DatasetEntry], eval_datasets: list[DatasetEntry]) -> Result:
    """Fail if a data set is not found, or the hub refuses it. Makes one short request for each that is on the hub."""
    problems = Problems()
    local: list[str] = []
    remote: list[str] = []
    for flag, entries in (("dataset", datasets), ("eval_dataset", eval_datasets)):
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
    where = "the cache (offline)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    where += " with a token" if get_token() else ", without a token"
    found = []
    if local:
        found.append(", ".join(dict.fromkeys(local)))
    if remote:
        found.append(f"{', '.join(dict.fromkeys(remote))} from {where}")
    return of_problems("data", problems, "; ".join(found))
