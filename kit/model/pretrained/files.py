"""The files of a model's folder, checked before transformers opens them.

Promises: an untrusted file that is not a regular file, or too large, is refused by name at once. Whether what it
says fits the weights is checked when these are loaded.
"""

import json
import re
from pathlib import Path
from typing import Any

from kit.system.durable import SMALL_BYTES, open_regular, read_object, read_small
from kit.system.errors import Problem, UserError, raise_if

MAX_TOKENIZER_BYTES = 1 << 28  # the largest published ones have 35 MB
MAX_LAYERS = 1_000  # the deepest published models have about 200
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# What transformers reads as a whole. Other files that lie beside a model, such as data or results, may have any size.
_READ = re.compile(
    r"config|tokens|tokenizer|vocab|merges|template|\.index\.|^(dict|emoji|byte_maps)\.|\.(model|jinja)$"
)


def check_files(folder: Path, field: str) -> None:
    """Raise ``UserError`` if transformers should not open the files of a model or an adapter.

    Args:
        field: the setting that names the folder.
    """
    problems = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".model", ".jinja", ".txt"):
            continue
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
        except OSError as error:
            if not path.is_dir():
                problems.append(Problem(field, f"{path}: {error.strerror}", "a file"))
            continue
        most = MAX_TOKENIZER_BYTES if path.name == "tokenizer.json" else SMALL_BYTES
        if path.suffix != ".safetensors" and _READ.search(path.name) and size > most:
            problems.append(Problem(field, f"{path} has {size >> 20} MiB", f"at most {most >> 20} MiB"))
    raise_if(problems)


def check_config(path: Path) -> None:
    """Raise ``UserError`` if a config.json asks for too many layers: configs make lists of them."""
    values = read_object(path)
    parts: list[Any] = [values, values.get("text_config"), values.get("vision_config")]
    for part in parts:
        for key in _LAYERS if isinstance(part, dict) else ():
            number = part.get(key)
            if isinstance(number, int | float) and not 0 <= number <= MAX_LAYERS:
                raise UserError(f"{path} {key}", f"found {number}", f"0 to {MAX_LAYERS}")


def check_index(folder: Path) -> None:
    """Raise ``UserError`` if the index of weights in several files is damaged, or leads out of their folder."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file() or (folder / "model.safetensors").is_file():
        return  # transformers ignores the index if the weights are in one file
    try:
        values = json.loads(read_small(path))
        files = [Path(file) for file in values["weight_map"].values()] if isinstance(values["metadata"], dict) else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        files = []
    if not files:
        found = f"{path} does not say which weights are in which file"
        raise UserError("model_name_or_path", found, "JSON with weight_map and metadata")
    if outside := [file for file in files if file.is_absolute() or ".." in file.parts]:
        raise UserError("model_name_or_path", f"{path} names {str(outside[0])!r}", "files in its folder")
