"""Find a model by its name, and read its shape from its config.json: without a network, transformers or torch.

A model is a folder, a hub id whose config is in the cache, or one of the shapes in ``recipes/shapes/``, which hold the
numbers of public models. A hub id that is not in the cache is looked for among those too.

Promises: the shape is that of the model, or there is an error. A family that is not in ``FAMILIES`` is refused by name:
its layers have other parts, and a sum without them would be wrong.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.config.recipe import RECIPES
from kit.errors import Problem, UserError, did_you_mean, kind, raise_if
from kit.plan.shape import Shape

SHAPES = RECIPES / "shapes"
MODEL = "model_name_or_path"
NO_PLAN = "it has no plan; the report of a run with --max_steps 2 shows the peak that was measured"
# What a family's config.json does not say: its biases, or the key that says so, its norms, and whether it is tied.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"bias_key": "attention_bias"},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"bias_key": "attention_bias", "norm_of_heads": "head"},
    "gemma": {"bias_key": "attention_bias", "tied": True},
    "gemma2": {"bias_key": "attention_bias", "tied": True, "num_norms": 4, "eager": True},
    "gemma3_text": {"bias_key": "attention_bias", "tied": True, "num_norms": 4, "norm_of_heads": "head"},
    "phi3": {"fused": True},
    "smollm3": {"bias_key": "attention_bias", "tied": True},
    "olmo2": {"bias_key": "attention_bias", "norm_of_heads": "all"},
    "olmo3": {"bias_key": "attention_bias", "norm_of_heads": "all"},
}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
# Words in a hub id that tell how the model was trained, not how large it is.
_VARIANTS = re.compile(r"-(instruct|chat|base|it|pt|hf|sft|dpo|v\d[\d.]*|\d{4}|meta)(?=-|$)")


def find_shape(name: str, field: str = MODEL) -> Shape:
    """Return the shape of a model.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: there is no such model, or its config.json does not hold the sizes of a family that is known.
    """
    folder = Path(os.path.expanduser(name))
    if (path := folder / "config.json").is_file():
        says_nothing = folder.name == "model" and folder.parent.name
        return read_shape(path, folder.parent.name if says_nothing else folder.name, field)
    if os.path.exists(folder) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "no config.json in it" if folder.is_dir() else "a file" if folder.is_file() else "no such folder"
        raise UserError(Problem(field, f"{name}: {found}", "a folder with config.json, or a hub id"))
    shipped = {path.parent.name: path for path in sorted(SHAPES.glob("*/config.json"))}
    if name in shipped:
        return read_shape(shipped[name], name, field)
    if name.count("/") == 1:
        if cached := _cached(name):
            return read_shape(cached, name.split("/")[1], field)
        ids = {_plain(_hub_id(path)): path for path in shipped.values()}
        if known := ids.get(_plain(name)):
            return read_shape(known, known.parent.name, field)
        fix = f"`hf download {name} config.json` puts it there; or `kit plan --params 8B` plans for its size"
        raise UserError(Problem(field, f"{name}: its config.json is not in the cache", fix=fix))
    expected = f"a folder, a hub id, or one of {', '.join(shipped)}"
    raise UserError(Problem(field, f"no model {name!r}", expected, did_you_mean(name, shipped)))


def shipped_id(name: str) -> str | None:
    """Return the hub id of the shape that comes with the kit under ``name``; None if there is none."""
    path = SHAPES / name / "config.json"
    return _hub_id(path) if "/" not in name and path.is_file() else None


def _hub_id(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["_name_or_path"])


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
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(field, f"{path} is no JSON ({error})")) from None
    if not isinstance(config, dict):
        raise UserError(Problem(field, f"{path} holds {kind(config)}", "an object"))
    return shape_of(config, name, field, path)


def shape_of(values: Mapping[str, Any], name: str, field: str = MODEL, path: Path | None = None) -> Shape:
    """Return the shape that the values of a config.json give. Raises ``UserError`` as ``find_shape`` does.

    Args:
        path: the file that they are from, if any.
    """
    config, where = dict(values), path or name
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(Problem(field, f"{name}: the formulas do not know the family {family!r}", known, NO_PLAN))
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    sizes = _SIZES | {"num_kv_heads": "num_key_value_heads"}
    if config.get("head_dim") is None:
        default = 256 if family.startswith("gemma") else None
        config["head_dim"] = default or _quotient(config.get("hidden_size"), heads)
    wrong = {key: config.get(key) for key in [*sizes.values(), "head_dim"] if not _is_size(config.get(key))}
    raise_if(
        Problem(field, f"{where}: {key} is {value!r}" if value is not None else f"{where} has no {key}", "a number")
        for key, value in wrong.items()
    )
    facts = dict(FAMILIES[family])
    has_bias = bool(config.get(facts.pop("bias_key", ""), False))
    positions = config.get("max_position_embeddings")
    return Shape(
        name=name,
        model_type=family,
        folder=path.parent if path else None,
        **{ours: config[theirs] for ours, theirs in sizes.items()},
        head_dim=config["head_dim"],
        max_positions=positions if _is_size(positions) else None,
        tied=bool(config.get("tie_word_embeddings", facts.pop("tied", False))),
        qkv_bias=facts.pop("qkv_bias", has_bias),
        output_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        caps_logits=bool(config.get("final_logit_softcapping")),
        caps_scores=bool(config.get("attn_logit_softcapping")),
        **{key: value for key, value in facts.items() if key != "tied"},
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _quotient(hidden: Any, heads: Any) -> int | None:
    return hidden // heads if _is_size(hidden) and _is_size(heads) else None


def shape_of_size(num_parameters: float, text: str) -> Shape:
    """Return a shape of about so many parameters: that of the nearest Llama, with layers as wide as it takes.

    Args:
        text: the number as the user wrote it, for the name.
    """
    llamas = [read_shape(path, path.parent.name) for path in sorted(SHAPES.glob("llama-*/config.json"))]
    near = min(llamas, key=lambda shape: abs(shape.num_parameters / num_parameters - 1))
    if abs(near.num_parameters / num_parameters - 1) < 0.05:
        return replace(near, name=f"{text} (as {near.name})", folder=None)

    def scaled(width: int) -> Shape:
        heads = max(1, width // near.head_dim)
        kv_heads = max(1, heads * near.num_kv_heads // near.num_heads)
        inner = width * near.intermediate_size // near.hidden_size
        return replace(
            near,
            name=f"{text} (as {near.name}, scaled)",
            folder=None,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            intermediate_size=inner,
        )

    widths = range(near.head_dim, 4 * near.hidden_size + 1, near.head_dim)
    return min(map(scaled, widths), key=lambda shape: abs(shape.num_parameters - num_parameters))
