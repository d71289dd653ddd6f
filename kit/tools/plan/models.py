"""Find a model by its name, and read its shape from its config.json: without a network, transformers or torch.

A model is a folder, a hub id whose config is in the cache, or one of the shapes in ``recipes/shapes/``, which hold the
numbers of public models. A hub id that is not in the cache is looked for among those too.

Promises: the shape is that of the model, or there is an error (kit/memory/families.py).
"""

import json
import os
import re
import shlex
from pathlib import Path

from kit.config.paths import RECIPES
from kit.memory.families import MODEL, shape_of
from kit.memory.shape import Shape
from kit.system.durable import read_small
from kit.system.errors import UserError, did_you_mean, kind

SHAPES = RECIPES / "shapes"
# Words in a hub id that say how the model was trained, not how large it is.
_VARIANTS = re.compile(r"-(instruct|chat|base|it|pt|hf|sft|dpo|v\d[\d.]*|\d{4}|meta)(?=-|$)")


def find_shape(name: str, field: str = MODEL) -> Shape:
    """Return the shape of a model.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: there is no such model, or its config.json does not hold the sizes of a family that is known.
    """
    folder = Path(os.path.expanduser(name))
    path = folder / "config.json"
    if path.is_file():
        says_nothing = folder.name == "model" and folder.parent.name
        return read_shape(path, folder.parent.name if says_nothing else folder.name, field)
    if os.path.exists(folder) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "no config.json in it" if folder.is_dir() else "a file" if folder.is_file() else "no such folder"
        raise UserError(field, f"{name}: {found}", "a folder with config.json, or a hub id")
    shipped = {path.parent.name: path for path in sorted(SHAPES.glob("*/config.json"))}
    if name in shipped:
        return read_shape(shipped[name], name, field)
    if name.count("/") == 1:
        cached = _cached(name)
        if cached:
            return read_shape(cached, name.split("/")[1], field)
        ids = {_plain(_hub_id(path)): path for path in shipped.values()}
        known = ids.get(_plain(name))
        if known:
            return read_shape(known, known.parent.name, field)
        fix = f"`hf download {shlex.quote(name)} config.json` puts it there; or a shape of its size: --model llama-8b"
        raise UserError(field, f"{name}: its config.json is not in the cache", fix=fix)
    expected = f"a folder, a hub id, or one of {', '.join(shipped)}"
    raise UserError(field, f"no model {name!r}", expected, did_you_mean(name, shipped))


def shipped_id(name: str) -> str | None:
    """Return the hub id of the shape that comes with the kit under ``name``; None if there is none."""
    path = SHAPES / name / "config.json"
    return _hub_id(path) if "/" not in name and path.is_file() else None


def _hub_id(path: Path) -> str:
    return str(json.loads(read_small(path))["_name_or_path"])


def _plain(name: str) -> str:
    """A hub id without its owner's spelling and the words for variants: Llama-3.1-8B-Instruct is Llama-3.1-8B."""
    owner, _, rest = name.lower().partition("/")
    return f"{owner}/{_VARIANTS.sub('', rest.removeprefix('meta-'))}"


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def read_shape(path: Path, name: str, field: str = MODEL) -> Shape:
    """Read the shape from a config.json. Raises ``UserError`` as ``find_shape`` does."""
    try:
        config = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(field, f"{path} is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(field, f"{path} holds {kind(config)}", "an object")
    return shape_of(config, name, field, path)
