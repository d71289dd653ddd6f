"""The families of models whose memory the formulas know: the shape of a model from the values of its config.json.

Promises: the shape is that of the model, or there is an error. A family that is not in ``FAMILIES`` is refused by name:
its layers have other parts, and a sum without them would be wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.memory.kinds import gemma4, mixture, qwen3_5
from kit.memory.shape import Shape
from kit.memory.towers import read_parts
from kit.model.pretrained.files import check_config
from kit.system.errors import Problem, UserError, first_line, raise_if

MODEL = "model_name_or_path"
NO_PLAN = "no plan for it; the report of a run with --max_steps 2 shows the measured peak"
# What a family's config.json does not say: its biases, or the key that says so, its norms, whether it is tied, and
# windows of its layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"bias_key": "attention_bias"},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"bias_key": "attention_bias", "norm_of_heads": "head"},
    "qwen3_moe": {"bias_key": "attention_bias", "norm_of_heads": "head"},
    "gpt_oss": {"bias_key": "attention_bias", "eager": True, "has_sinks": True},
    "gemma": {"bias_key": "attention_bias", "tied": True},
    "gemma2": {"bias_key": "attention_bias", "tied": True, "num_norms": 4, "eager": True},
    "gemma3_text": {
        "bias_key": "attention_bias",
        "tied": True,
        "num_norms": 4,
        "norm_of_heads": "head",
        "supports_sequence_parallelism": False,
    },
    "gemma4_text": {"bias_key": "attention_bias", "tied": True, "num_norms": 4, "supports_sequence_parallelism": False},
    "ministral3": {},
    "phi3": {"fused": True},
    "qwen3_5_text": {"bias_key": "attention_bias", "norm_of_heads": "head", "supports_sequence_parallelism": False},
    "smollm3": {"bias_key": "attention_bias", "tied": True},
    "olmo2": {"bias_key": "attention_bias", "norm_of_heads": "all"},
    "olmo3": {"bias_key": "attention_bias", "norm_of_heads": "all", "supports_sequence_parallelism": False},
}
# Families whose layers have other parts, or are of several kinds: what gives them, from the shape of a plain layer and
# the values.
_KINDS: dict[str, Callable[[Shape, Mapping[str, Any]], Shape]] = {
    "gemma4_text": gemma4,
    "qwen3_5_text": qwen3_5,
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), mixture),
}
# Families of text in models of images, and those whose layers they have.
_TEXT = {name: "qwen2" for name in ("qwen2_vl_text", "qwen2_5_vl_text")}
_TEXT |= {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
_PARTS = ("text_config", "vision_config", "audio_config")  # one of which a model of more than text has
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def shape_of(values: Mapping[str, Any], name: str, field: str = MODEL, path: Path | None = None) -> Shape:
    """Return the shape that the values of a config.json give.

    Args:
        name: of the model, for messages.
        field: the setting that names it, for messages.
        path: the file that they are from, if any.

    Raises:
        UserError: a family that is not in ``FAMILIES``, or values that are no sizes.
    """
    config, where = dict(values), path or name
    family: Any = config.get("model_type")
    parts = None
    if family not in FAMILIES and any(key in values for key in _PARTS):
        try:
            if path:
                check_config(path)
            parts = read_parts(values)
        except Exception as error:  # the code of any family, with any numbers
            found = f"{where}: the model cannot be built without weights ({first_line(error)})"
            raise UserError(field, found, "a model whose encoder has layers of attention", NO_PLAN) from None
        config = parts.text
        family = _TEXT.get(str(config.get("model_type")), config.get("model_type"))
    layer = parts.layer if parts and family not in FAMILIES else None
    if family not in FAMILIES and not layer:
        known = ", ".join(FAMILIES)
        raise UserError(field, f"{name}: the formulas do not cover the family {family!r}", known, NO_PLAN)
    hidden_size, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 0)
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and _is_size(hidden_size) and _is_size(heads):
        config["head_dim"] = 256 if family.startswith("gemma") else hidden_size // heads
    wrong = {key: config.get(key) for key in _SIZES.values() if not _is_size(config.get(key))}
    raise_if(
        Problem(field, f"{where}: {key} is {value!r}" if value is not None else f"{where} has no {key}", "a number")
        for key, value in wrong.items()
    )
    family_values = dict(FAMILIES.get(family, {}))
    has_bias = bool(config.get(family_values.pop("bias_key", ""), False))
    positions = config.get("max_position_embeddings")
    shape = Shape(
        name=name,
        folder=path.parent if path else None,
        **{ours: config[theirs] for ours, theirs in _SIZES.items()},
        max_positions=positions if _is_size(positions) else None,
        tied=bool(config.get("tie_word_embeddings", family_values.pop("tied", False))),
        qkv_bias=family_values.pop("qkv_bias", has_bias),
        output_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        caps_logits=bool(config.get("final_logit_softcapping")),
        caps_scores=bool(config.get("attn_logit_softcapping")),
        supports_sequence_parallelism=family_values.pop("supports_sequence_parallelism", not _needs_whole_rows(config))
        and parts is None,
        tower=parts.tower if parts else None,
        **{key: value for key, value in family_values.items() if key != "tied"},
    )
    if layer:
        read = ("own_linears", "num_norms", "norm_of_heads", "gated", "layer_norm")
        shape = replace(shape, **{key: getattr(layer, key) for key in read})
    try:
        shape = _KINDS[family](shape, config) if family in _KINDS else shape
        heads = [size for _, kind in shape.kinds for size in (kind.num_heads, kind.num_kv_heads, kind.head_dim)]
        if not all(map(_is_size, heads)):
            raise ValueError("a number or size of heads is not above 0")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        found = f"{where}: its layers cannot be read ({error})"
        raise UserError(field, found, "the sizes of each kind of layer") from None
    if parts and shape.num_parameters != parts.num_parameters:
        found = f"{name}: it has {parts.num_parameters:,} parameters, by formulas {shape.num_parameters:,}"
        raise UserError(field, found, "a text of layers that the formulas know", NO_PLAN)
    return shape


def _needs_whole_rows(config: Mapping[str, Any]) -> bool:
    """Whether a window, or rope that the longest row sets, forbids it (``kit.model.layers.sequence_parallel``)."""
    has_windows = config.get("sliding_window") and config.get("use_sliding_window", True)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    kinds = {rope.get("rope_type"), rope.get("type")} if isinstance(rope, dict) else set()
    return bool(has_windows) or bool(kinds & {"dynamic", "longrope"})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
