"""Writes a draft as the text of a recipe: settings in the order of ``--help``, with their comments."""

import re
from typing import Any

from kit.config.dataset_entry import in_one_line
from kit.config.recipe import Recipe
from kit.system.credentials import redacted
from kit.system.visible import one_line
from kit.tools.convert.draft import Draft, Group, shown


def recipe_text(draft: Draft, header: list[str]) -> str:
    """Return the recipe. ``header``: lines of comment at its top."""
    lines = [f"# {one_line(line)}".rstrip() for line in header]
    group = ""
    for name, info in Recipe.model_fields.items():
        if name in draft.values:
            extra: Any = info.json_schema_extra
            lines += [""] if extra["group"] != group else []
            group = extra["group"]
            lines += lines_of(name, draft.values[name], draft.notes.get(name, ""))
    for kind in Group:
        left_out = [each for each in draft.left_out if each.group is kind]
        lines += ["", f"# Left out: {kind.value}."] if left_out else []
        lines += [f"#   {one_line(each.key)}: {one_line(shown(each.value))}  ({each.reason})" for each in left_out]
    return redacted("\n".join(lines) + "\n")


def lines_of(name: str, value: Any, note: str = "") -> list[str]:
    """The lines of one setting."""
    comment = f"  # {one_line(note)}" if note else ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [f"{name}:{comment}", *(f"  - {_scalar(item)}" for item in value)]
    return [f"{name}: {_scalar(value)}{comment}"]


def _scalar(value: Any) -> str:
    """A value in YAML, in one line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value):
        return value  # recipes are read as text, so a number that was typed needs no quotes
    return in_one_line(value)
