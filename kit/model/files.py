"""The files of a model's folder, checked before transformers opens them.

Promises: a file of a stranger that is no regular file, or too large, and numbers in it that would build a model without
end, are refused by name in a moment. Whether the numbers fit the weights is checked when these are loaded.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.durable import SMALL_BYTES, open_regular, read_small
from kit.errors import Problem, UserError, first_line, kind, raise_if

MAX_LAYERS = 1_000  # the deepest published models have about 200
MAX_MODULES = 200_000  # about twice those of the largest models whose experts are modules
MAX_TOKENIZER_BYTES = 1 << 28  # the largest published ones have 35 MB
# What transformers reads as a whole. Other files that lie beside a model, such as data or results, may have any size.
_READ = re.compile(
    r"config|tokens|tokenizer|vocab|merges|template|\.index\.|^(dict|emoji|byte_maps)\.|\.(model|jinja)$"
)
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_COUNTS = re.compile(r"(?:^|_)(?:n_layer|layers)$|^depths?$")
_NOT_OF_THE_MODEL = ("task_specific_params", "quantization_config")


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


def check_json(folder: Path, field: str) -> None:
    """Raise ``UserError`` if a JSON file that transformers opens with the weights is damaged."""
    for name in (_CONFIG, "generation_config.json", "adapter_config.json", _INDEX):
        path = folder / name
        is_index = name == _INDEX
        if not path.is_file() or (is_index and (folder / "model.safetensors").is_file()):
            continue  # transformers ignores the index if the weights are in one file
        try:
            values = json.loads(read_small(path))
        except (OSError, ValueError, RecursionError) as error:
            if name in (_CONFIG, "generation_config.json"):
                continue  # transformers reports the one, and continues without the other
            raise UserError(Problem(field, f"{path} is no JSON ({first_line(error)})")) from None
        if name == _CONFIG:
            raise_if(_too_many(values, path))
            raise_if(_encoder(values, folder, field))
        elif not isinstance(values, dict):
            raise UserError(Problem(field, f"{path} holds {kind(values)}", "an object"))
        elif is_index:
            _check_index(values, path, field)


def _encoder(values: Any, folder: Path, field: str) -> Iterator[Problem]:
    """The problem of a model with an encoder and a decoder, which need not wait until transformers is imported."""
    if isinstance(values, dict) and values.get("is_encoder_decoder") is True:
        what = f"{values.get('model_type', 'it')} is an encoder and a decoder"
        yield Problem(field, f"{folder} is not a causal language model: {what}")


def check_config(path: Path) -> None:
    """Raise ``UserError`` if numbers in a config.json would build a model without end."""
    try:
        values = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports it
    raise_if(_too_many(values, path))


def _too_many(values: Any, path: Path) -> Iterator[Problem]:
    """The problems of numbers of layers, also in configs inside the config.

    Experts are modules that are counted as they are built (``MAX_MODULES``), or parts of one tensor. Their number in a
    config may be large (Doge: 16,384), or be there and not be used.
    """
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if key in _NOT_OF_THE_MODEL:
            continue
        yield from _too_many(value, path)
        numbers = value if isinstance(value, list) else [value]
        if not _COUNTS.search(key):
            continue
        least = 0 if key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") else -MAX_LAYERS
        for number in numbers:
            if isinstance(number, int | float) and not least <= number <= MAX_LAYERS:
                yield Problem(f"{path} {key}", f"found {number}", f"{max(least, 0)} to {MAX_LAYERS}")
                break


def _check_index(values: dict[str, Any], path: Path, field: str) -> None:
    shards = values.get("weight_map")
    metadata = values.get("metadata")
    files = list(shards.values()) if isinstance(shards, dict) and isinstance(metadata, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        found = f"{path} does not say which weights are in which file"
        raise UserError(Problem(field, found, "weight_map and metadata"))
    if outside := [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]:
        raise UserError(Problem(field, f"{path} names {outside[0]!r}", "files in its folder"))
