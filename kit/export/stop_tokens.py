"""The stop tokens of a trained model, at which plain ``generate`` stops.

A chat template ends an answer with a token of its own, such as ``<|im_end|>``; the base's ``generation_config.json``
often names only EOS. Then the model writes the token that it was trained to write, and generation goes on after it.

Promises: tokens are added, never taken away, and only those at which generation does not stop yet.
"""

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from kit.config.settings.model import ModelSettings
from kit.model.pretrained.locate import hub_options, locate_model
from kit.system.durable import read_small

_FILE = "generation_config.json"  # PEFT reads none beside an adapter; the model card loads it, and so does a merge


def new_stops(model: Any, stops: Mapping[str, int]) -> dict[str, int]:
    """Return those of ``stops`` (token to id) at which ``model.generate`` does not stop by itself."""
    config = getattr(model, "generation_config", None)
    known = _ids(config.eos_token_id) if config else list(stops.values())
    return {token: id_ for token, id_ in stops.items() if id_ not in known}


def write_stops(folder: Path, model: Any, stops: Mapping[str, int]) -> None:
    """Write the generation settings of ``model`` to ``folder``, with ``stops`` added; nothing if none is new."""
    new = new_stops(model, stops)
    if new:
        config = copy.deepcopy(model.generation_config)
        config.eos_token_id = [*_ids(config.eos_token_id), *new.values()]
        config.to_json_file(folder / _FILE)  # `save_pretrained` refuses settings that many published models have


def read_stops(folder: Path, tokenizer: Any) -> dict[str, int]:
    """Return what ``write_stops`` wrote beside an adapter, token to id; empty if it wrote nothing."""
    try:
        ids = _ids(json.loads(read_small(folder / _FILE))["eos_token_id"])
        return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


def open_generation_config(settings: ModelSettings, model: Any) -> None:
    """Give a model that was built without weights the generation settings of its base, if the base has a file."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        name = locate_model(settings.model_name_or_path, settings.model_revision)
        model.generation_config = GenerationConfig.from_pretrained(name, **hub_options(settings, is_checked=True))


def describe_stops(stops: Mapping[str, int], where: str) -> list[str]:
    """Return a line that names the tokens added to the model in ``where``; empty if there are none."""
    if not stops:
        return []
    return [f"stop tokens added to the model in {where}: {', '.join(stops)}"]


def _ids(eos_token_id: Any) -> list[int]:
    """The ids of a config's ``eos_token_id``: none, one, or a list."""
    if eos_token_id is None:
        return []
    return list(eos_token_id) if isinstance(eos_token_id, list) else [eos_token_id]
