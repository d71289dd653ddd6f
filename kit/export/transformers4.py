"""Let transformers 4, and what is built on it, read the files of a model that transformers 5 wrote.

Version 5 writes the base and the scaling of rotary positions into ``rope_parameters`` alone. Version 4 does not know
that key: it takes 10000 and no scaling, and says nothing. A tokenizer it refuses, by the name of its class.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_for_transformers_4(folder: Path) -> None:
    """Add to ``config.json`` and ``tokenizer_config.json`` in ``folder`` what version 4 looks for; 5 reads the same."""
    _edit(folder / "config.json", _add_rotary)
    _edit(folder / "tokenizer_config.json", _rename_tokens)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    if path.is_file():  # an adapter has no config.json
        values = json.loads(path.read_text(encoding="utf-8"))
        change(values)
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add_rotary(values: dict[str, Any]) -> None:
    for name, part in values.items():
        if name.endswith("_config") and isinstance(part, dict):
            _add_rotary(part)
    rotary = values.get("rope_parameters") or {}
    older: dict[str, Any] = {}
    family = values.get("model_type")
    # By kinds of layers; version 5 alone has other such families. A config of one's own may lack a kind.
    if family in ("gemma3_text", "gemma3n_text") and rotary.get("full_attention") and rotary.get("sliding_attention"):
        older["rope_local_base_freq"] = rotary["sliding_attention"].get("rope_theta")
        rotary = rotary["full_attention"]
    if "rope_theta" not in rotary:
        return
    beside = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rotary.items() if key not in beside}
    older |= {key: rotary[key] for key in beside if key in rotary}
    older["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    for key, value in older.items():
        values.setdefault(key, value)  # some families have such a key of their own


def _rename_tokens(values: dict[str, Any]) -> None:
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
