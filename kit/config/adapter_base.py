"""An adapter brings its base: find the model that ``adapter_config.json`` names. Plain Python.

Promises: an adapter is never put on another model than its own because a setting was left out.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.system.durable import read_object
from kit.system.errors import Problem

ADAPTER_CONFIG = "adapter_config.json"
_MODEL, _ADAPTER = "model_name_or_path", "adapter_name_or_path"


def fill_in_base(values: dict[str, Any], where: dict[str, str]) -> list[Problem]:
    """Set model, adapter and its kind in ``values`` where they name only an adapter.

    If the model is the folder of an adapter, that becomes ``adapter_name_or_path``. If there is an adapter and no
    model, the model is the base that the adapter names. ``adapter_type`` is what the adapter says, if it was not given.

    Args:
        values: settings as they were typed; changed in place.
        where: what to call each key in a message; changed with ``values``.

    Returns:
        A problem if there is an adapter whose base cannot be found.
    """
    model = values.get(_MODEL)
    if isinstance(model, str) and not values.get(_ADAPTER) and _is_adapter(model):
        values[_ADAPTER] = values.pop(_MODEL)
        where[_ADAPTER] = f"{where.pop(_MODEL)} (an adapter)"
    adapter = values.get(_ADAPTER)
    if not adapter or not isinstance(adapter, str):
        return []
    if (kind := saved_adapter_type(adapter)) != "lora":
        values.setdefault("adapter_type", kind)
    if _MODEL in values:
        return []
    base = adapter_config(adapter).get("base_model_name_or_path")
    base = base if isinstance(base, str) else ""
    if base and (not is_local(base) or os.path.isdir(os.path.expanduser(base))):
        values[_MODEL] = base
        return []
    values[_MODEL] = "?"  # there, so that its absence is no second problem
    what = f"its base is {base}, which is not on this machine" if base else f"no {ADAPTER_CONFIG} names its base"
    expected = "the folder of an adapter, such as final/ of a run"
    fix = f"--model_name_or_path BASE --adapter_name_or_path {shlex.quote(adapter)}"
    return [Problem(where[_ADAPTER], f"{adapter}: {what}", expected, fix)]


def saved_adapter_type(name: str) -> str:
    """Return the ``adapter_type`` of a saved adapter, as ``adapter_config`` reads it; lora if it says none."""
    kind = adapter_config(name).get("peft_type")
    return kind.lower() if kind and isinstance(kind, str) else "lora"


def adapter_config(name: str) -> dict[str, Any]:
    """Return what the ``adapter_config.json`` of a folder, or of a hub id in the cache, says; empty if nothing does."""
    path: Any = Path(os.path.expanduser(name), ADAPTER_CONFIG)
    if not is_local(name):
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # it is not a hub id
            path = try_to_load_from_cache(name, ADAPTER_CONFIG)
    return read_object(path) if isinstance(path, Path | str) else {}


def is_local(name: str) -> bool:
    """Return whether ``name`` is a folder, there or not, and no hub id."""
    return os.path.exists(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _is_adapter(name: str) -> bool:
    folder = Path(os.path.expanduser(name))
    return os.path.isfile(folder / ADAPTER_CONFIG) and not os.path.isfile(folder / "config.json")
