"""The starts of a run in ``run.json``: when it started, where it resumed, and which settings changed.

Promises: a start is listed as long as its steps count. A run that goes back to an earlier step drops later starts.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kit.run.identity import changes


def starts(old: str, new: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return all starts of a run: ``step`` (done before), ``time`` (UTC, ISO 8601) and ``changed`` (strings) of each.

    Args:
        old: the text of ``run.json`` of the start before this one; empty if there is none.
        new: ``recipe``, ``strategy`` and ``versions`` of this start.
        step: the steps that are done.
    """
    start = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "changed": list[str]()}
    if not step:
        return [start]
    try:
        record = json.loads(old)
        earlier = [dict(each) for each in record.get("starts", []) if each["step"] <= step]
        return [*earlier, {**start, "changed": changes(record, new)}]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [start]  # resumed from a checkpoint of another folder
