"""The starts of a run, as ``run.json`` lists them: when it began, where it was continued, and what was changed then.

Promises: a start is listed as long as its steps count. A run that goes back to an earlier step forgets later starts.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# Settings of a single start. They say nothing about the steps that follow.
_OF_ONE_START = ("resume_from_checkpoint", "overwrite_output_dir")
_STRATEGY = ("type", "num_processes", "num_replicas", "mixed_precision", "device", "num_threads")


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
        return [*earlier, {**start, "changed": _changed(record, new)}]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [start]  # continued from a checkpoint of another folder


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two starts: ``eval_steps: 0 -> 10``. Keys that one of two versions lacks are left out."""
    settings = [key for key in new["recipe"] if key not in _OF_ONE_START]
    parts = {"recipe": settings, "strategy": _STRATEGY, "versions": list(new["versions"])}
    pairs = [(key, old[part][key], new[part][key]) for part, keys in parts.items() for key in keys if key in old[part]]
    return [f"{'strategy' if key == 'type' else key}: {was} -> {now}" for key, was, now in pairs if was != now]
