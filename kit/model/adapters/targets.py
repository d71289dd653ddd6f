"""Which modules of a model can be adapted or quantised to 4 bits, and which are left out and why.

All answers come from modules and shapes, so they are the same for a model on meta and for one with weights.
"""

import re
from collections.abc import Collection
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.pytorch_utils import Conv1D

from kit.config.expressions import is_expression, matches
from kit.model.adapters.reach import trace, unreached_parts

# Names of MoE routers: an adapter on them would change which expert a token reaches.
_ROUTER = re.compile(r"(^|\.)(\w*router\w*|gate|\w*expert_gate)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)\w*experts?(\.|$)")
# Linear modules whose weights the model reads itself, past the module's own forward: neither adapter nor 4 bits work.
_READ_DIRECTLY = re.compile(r"(^|\.)(mixer\.dt_proj|mamba\.dt_proj|altup\.(correction|prediction)_coefs)$")
# peft refuses these modules: the fast kernels of these families read the weights and would not see an adapter.
_MAMBA_FAMILIES = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
_MAMBA_MODULES = {"out_proj", "conv1d"}
# Names that the modules of experts had in checkpoints of earlier versions of transformers.
_EARLIER_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def all_linear_targets(model: Any, kept: Collection[int] = ()) -> list[str]:
    """Return the names of the modules that ``all-linear`` adapts.

    These are all linear modules, experts and shared experts among them. Left out are the output head, routers, modules
    that get no gradient or are not called, and those that peft refuses or would take for other modules
    (``names_taken_for_experts``, ``lost_on_reload``). Fused experts are parameters, not modules.

    Args:
        kept: ``id`` of weights that images and audio reach.
    """
    excluded = [*unreached_parts(model), *trace(model).uncalled_modules, *lost_on_reload(model)]
    excluded_prefixes = tuple(f"{name}." for name in excluded)
    refused_names = names_taken_for_experts(model)
    if model.config.get_text_config().model_type in _MAMBA_FAMILIES:
        refused_names |= _MAMBA_MODULES
    head = model.get_output_embeddings()
    targets = []
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        if not is_linear or is_router(name) or _READ_DIRECTLY.search(name):
            continue
        is_reached = id(module.weight) in kept or not f"{name}.".startswith(excluded_prefixes)
        if not is_reached or last_part(name) in refused_names:
            continue
        targets.append(name)
    return targets


def layer_matrices(model: Any) -> list[torch.nn.Parameter]:
    """Return the weights that train of all linear modules, adapters among them, but for embeddings and output head.

    Fused experts, [experts, out, in], are not among them, nor are routers that are no linear modules.
    """
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    left_out = {id(p) for table in tables if table is not None for p in table.parameters()}
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    weights: dict[int, Any] = {id(module.weight): module.weight for module in linear if module.weight.requires_grad}
    return [weight for number, weight in weights.items() if number not in left_out]


def kept_out_of_4_bit(model: Any) -> list[str]:
    """Return the names of the linear modules, besides the output head, that ``qlora`` leaves as they are.

    These are routers, and modules whose weights the model reads without calling them.
    """
    return [name for name in linear_names(model) if is_router(name) or _READ_DIRECTLY.search(name)]


def names_taken_for_experts(model: Any) -> set[str]:
    """Return the last parts of names that peft takes for fused experts in this family, whatever module has them.

    In checkpoints of earlier versions of transformers the experts of these families had these names. So peft cannot
    adapt a dense layer or a shared expert of such a name, neither now nor when it opens a saved adapter.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=list(_EARLIER_EXPERT_NAMES))
    convert_peft_config_for_transformers(config, model, None)
    return _EARLIER_EXPERT_NAMES - set(config.target_modules or ())


def modules_taken_for_experts(model: Any) -> list[str]:
    """Return the linear modules that have one of ``names_taken_for_experts``, with * for the number of a layer."""
    names = names_taken_for_experts(model)
    found = [name for name in linear_names(model) if last_part(name) in names and not is_router(name)]
    return list(dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in found))


def lost_on_reload(model: Any) -> list[str]:
    """Return the names of linear modules whose saved adapters peft could not load.

    It applies to an adapter's names the patterns that convert checkpoints of the family. A pattern that also matches
    present names changes them (Laguna: shared_experts).
    """
    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return []
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    lost = []
    for name in linear_names(model):
        key = f"base_model.model.{name}.lora_A.weight"
        if apply_renamings(key, renamings) != key:
            lost.append(name)
    return lost


def split_targets(model: Any, targets: str | list[str], kept: Collection[int] = ()) -> tuple[list[str], list[str]]:
    """Divide ``lora_target_modules`` into names of modules and of parameters, such as fused experts.

    ``all-linear``, alone or among ``targets``, gives the full names of ``all_linear_targets``.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    of_modules: list[str] = []
    of_parameters: list[str] = []
    for target in [targets] if isinstance(targets, str) else targets:
        if target == "all-linear":
            of_modules += all_linear_targets(model, kept)
        elif not _matches_any(target, modules) and _matches_any(target, parameters):
            of_parameters.append(target)
        else:
            of_modules.append(target)
    return of_modules, of_parameters


def full_names(targets: list[str], names: list[str]) -> list[str]:
    """Return ``targets`` with those of ``names`` that an expression matches in its place.

    So a saved adapter lists what was adapted, and whoever opens it needs no expression.
    """
    found: list[str] = []
    for target in targets:
        found += [name for name in names if matches(name, target)] if is_expression(target) else [target]
    return list(dict.fromkeys(found))


def tied_tables(model: Any) -> list[Any]:
    """Return the embedding and the output head, modules, if they are one weight; else nothing."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    return tables if tables[1] is not None and tables[0].weight is tables[1].weight else []


def _matches_any(target: str, names: list[str]) -> bool:
    return any(matches(name, target) for name in names)


def is_fused_expert(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter holds the weights of all experts of a layer, [experts, out, in]."""
    return parameter.ndim == 3 and bool(_EXPERTS.search(name))


def is_router(name: str) -> bool:
    """Return whether a module of this name is an MoE router, or part of one."""
    return bool(_ROUTER.search(name))


def last_part(name: str) -> str:
    """Return the part of a module's name after its last dot."""
    return name.rpartition(".")[2]


def linear_names(model: Any) -> list[str]:
    """Return the names of all linear modules."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
