"""Names of modules and parameters: lists, and the regular expressions that can be written as such."""

import re
from typing import Any

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.expressions import is_expression
from kit.config.hints import hint_for_value
from kit.tools.convert.draft import Draft, Group, as_list

_LAYERS = r"\[\\d\]\+|\\d\+|\[0-9\]\+|\.\*"


def put_targets(draft: Draft, given: Any, key: str = "lora_target_modules") -> None:
    """Set the modules that get an adapter: a list, all, or an expression that names modules in every layer."""
    if given in ("all", "all-linear", ["all"], ["all-linear"], ["ALL"]):
        draft.put("lora_target_modules", "all-linear")
        return
    if isinstance(given, str) and is_expression(given):
        if names := _names_in_each_layer(given):  # also in a text model, whose layers have other full names
            draft.put("lora_target_modules", names, "in every layer, as the expression says")
        else:
            draft.put("lora_target_modules", given)
        return
    names = as_list(given)
    if names and not any(is_expression(str(name)) for name in names):
        draft.put("lora_target_modules", names)
    else:
        draft.drop(key, given, Group.LEARNS, "in a list, peft reads names; an expression is a string by itself")


def put_adapter_type(draft: Draft, given: Any, key: str) -> None:
    """Set the kind of adapters, from another kit's name for it."""
    name = str(given).lower()
    if name in ADAPTER_TYPES:
        draft.put("adapter_type", name)
        return
    reason = hint_for_value("adapter_type", name) or "not known here"
    draft.drop(key, given, Group.LEARNS, f"{reason}; with --drop, method lora")


def put_initialisation(draft: Draft, given: Any, key: str) -> None:
    """Set how adapters begin, from peft's ``init_lora_weights`` or another kit's name for it."""
    name = str(given).lower()
    if given is None or name in ("true", "default", "lora-true"):
        return
    if name in ("gaussian", "orthogonal"):
        draft.put("init_lora_weights", name)
    else:
        reason = hint_for_value("init_lora_weights", name) or "not known here"
        draft.drop(key, given, Group.LEARNS, f"{reason}; with --drop, default")


def _names_in_each_layer(expression: str) -> list[str]:
    """``model.layers.[\\d]+.(mlp|self_attn).(up|down)_proj`` as ``up_proj``, ``down_proj``; empty if it says more.

    Kept are expressions of which a number stands for any layer. The groups before the last dot name the blocks that
    hold the modules.
    """
    parts = re.split(rf"\blayers\\?\.(?:{_LAYERS})\\?\.", expression.strip("^$"))
    block = r"(?:\(_checkpoint_wrapped_module\\?\.\)\?)?(?:\w+|\([\w|]+\))\\?\."
    found = re.fullmatch(rf"(?:{block})*(?:\(([\w|]+)\))?(\w*)", parts[-1])
    if len(parts) != 2 or not found or re.search(r"[|()\[\]]", parts[0]):
        return []
    return [f"{start}{found[2]}" for start in (found[1] or "").split("|")]


def put_patterns(draft: Draft, key: str, given: Any, name: str) -> None:
    """Set patterns of parameters, from regular expressions that match the beginning of a name."""
    patterns = []
    for expression in as_list(given):
        pattern = re.sub(rf"(?:{_LAYERS})", "*", str(expression).removeprefix("^").removesuffix("$"))
        if re.search(r"[\\()|+^$]|\]\{", pattern):
            draft.drop(key, expression, Group.LEARNS, f"{name} takes patterns such as model.layers.3[01].*")
            return
        patterns.append(pattern if str(expression).endswith("$") or pattern.endswith("*") else f"{pattern}*")
    draft.put(name, patterns)
