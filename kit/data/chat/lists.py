"""Lists that stand in a cell as a JSON string, and columns beside messages. Pure."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kit.data.chat.messages import Message, check_text
from kit.data.strict_json import RepeatedKey, parse
from kit.errors import Problem, Problems


def listed(value: Any) -> Any:
    """Return the list that a JSON string holds, as in a table of cells; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def list_of(where: str, value: Any, problems: Problems) -> Any:
    """Return what ``listed`` does. An object in a JSON string that has a key twice is a problem."""
    made = listed(value)
    if isinstance(made, list) and isinstance(value, str):
        try:
            parse(value)
        except RepeatedKey as error:
            problems.append(Problem(where, error.found, error.expected))
    return made


def are_messages(*values: Any) -> bool:
    """Whether all values are lists of messages that are written as a JSON string."""
    for value in values:
        items = listed(value) if isinstance(value, str) else None
        if not isinstance(items, list) or not items:
            return False
        if not all(isinstance(item, dict) and "role" in item for item in items):
            return False
    return True


def are_printed_messages(text: str) -> bool:
    """Whether ``text`` is how Python prints a list of messages."""
    return text.lstrip().startswith("[{'") and "'role'" in text


def explain_string(given: Any, problems: Problems) -> None:
    """Put into the last problem how to write a list, if ``given`` is a string that is no JSON list."""
    if isinstance(given, str) and problems:
        is_python = given.lstrip().startswith(("[{'", "[['", "[('"))
        fix = "this is how Python prints it: write json.dumps(...) into the cell" if is_python else ""
        problems[-1] = replace(problems[-1], found="a string that is no JSON list", fix=fix)


def system_message(values: Mapping[str, Any], problems: Problems) -> list[Message]:
    """The column ``system`` as a list of one system message; an empty list if the column is blank or absent."""
    system = values.get("system")
    if system is None or system == "":
        return []
    problems += check_text("system", system, may_be_empty=True)
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
