"""Names of modules and parameters: lists, and the regular expressions that can be written as such."""

import re
from typing import Any

from kit.config.fields import is_expression
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


def _names_in_each_layer(expression: str) -> list[str]:
    """``model.layers.[\\d]+.(mlp|self_attn).(up|down)_proj`` as ``up_proj``, ``down_proj``; empty if it says more.

    Kept are expressions of which a number stands for any layer. The groups before the last dot name the blocks that
    hold the modules.
    """
    parts = re.split(rf"(?:{_LAYERS})\\?\.", expression.strip("^$"), maxsplit=1)
    if len(parts) != 2:
        return []
    last = re.split(r"\\?\.(?![^(]*\))", parts[1])[-1]
    found = re.fullmatch(r"(?:\(([\w|]+)\))?(\w*)", last)
    if not found:
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
