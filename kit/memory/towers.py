"""Encoders of models that read images or sound: their shapes, from the model without weights (on meta).

Promises: the numbers of parameters are exact, whatever the family. To the formulas a layer of an encoder is one of a
decoder, over patches. How many patches and tokens an image has is read from the names that transformers' configs have
for it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from kit.memory.shape import Linear, Shape, Tower

# Squares of an image at most, with the whole of it as one more, where only the processor's settings say so.
_TILES = {"idefics3": 17, "smolvlm": 17, "llama4": 17}
_TILES |= dict.fromkeys(("aya_vision", "cohere2_vision", "internvl"), 13)
_LIMITS = {"gemma4": 280, "lfm2_vl": 2816}  # tokens of an image at most, where its size decides; else as of Qwen's
_STATES_PER_TOKEN = {"granite_speech": 5, "qwen2_audio": 2, "voxtral": 4}
_ATTENTION = re.compile(r"(^|\.)\w*att\w*\.")
_HEADS = ("num_heads", "num_attention_heads")
_INPUTS = re.compile(r"(^|\.)w?(q|k|v|qkv)(_?proj)?(\.|$)")  # queries, keys, values; the other module is the output's
# What configs call: the patches that become a token, on each side; its inverse; the tokens of an image, or of a square.
_MERGE = (
    "spatial_merge_size",
    "scale_factor",
    "downsample_factor",
    "pooling_kernel_size",
    "merge_kernel_size",
    "window_kernel_size",
)
_RATIO = ("downsample_ratio", "pixel_shuffle_ratio")
_TOKENS = ("mm_tokens_per_image", "vision_soft_tokens_per_image")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is read of a model of more than text."""

    text: dict[str, Any]  # the values of the config of its text
    layer: Shape | None  # of its text, if all have only linear modules and norms, and the same ones
    tower: Tower | None  # None: it is text alone
    num_parameters: int


def read_parts(values: Mapping[str, Any]) -> Parts:
    """Read the parts of the model that the values of a config.json describe.

    Raises:
        ValueError: transformers has no such model, its encoder's layers are not those of a transformer, or its
            projector has such layers too.
    """
    from transformers import AutoConfig  # slow to import, and a plan of text needs no torch

    from kit.model.adapters.freeze import parts_of
    from kit.model.build import on_meta
    from kit.model.four_bit import quantised_on_meta

    config = AutoConfig.for_model(**values)
    model = on_meta(config)
    part_of = parts_of(model)
    sizes = {name: p.numel() for name, p in model.named_parameters() if part_of.get(name, "language") != "language"}
    layers = {_layer(layer) for layer in getattr(model.get_decoder(), "layers", ())}
    layer = layers.pop() if len(layers) == 1 else None
    tower = None
    if sizes:
        quantised = [name for name, m in quantised_on_meta(model).named_modules() if hasattr(m, "quant_state")]
        if _layers(model, [name for name in sizes if part_of[name] == "projector"]):
            raise ValueError("its projector has layers with attention")  # a resampler of every patch, a Q-Former
        part = "vision" if "vision" in part_of.values() else "audio"
        if not (layers_of_tower := _layers(model, [name for name in sizes if part_of[name] == part])):
            raise ValueError("its encoder has no layers with attention")
        tower = Tower(
            part=part,
            layers=layers_of_tower,
            parameters={
                each: sum(size for name, size in sizes.items() if part_of[name] == each)
                for each in sorted({*part_of.values()} - {"language"})
            },
            linear_weights=sum(sizes.get(f"{name}.weight", 0) for name in quantised),
            **_patches(config),
        )
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    return Parts(
        text={**config.get_text_config().to_dict(), "tie_word_embeddings": is_tied},  # whatever its configs say
        layer=layer if layer and not layer.own_vectors else None,
        tower=tower,
        num_parameters=model.num_parameters(),
    )


def _layers(model: Any, names: Sequence[str]) -> Shape | None:
    """The shape of the layers of the largest stack with attention among the parameters of these ``names``, if any."""
    from torch.nn import ModuleList

    stacks = {
        (-sum(p.numel() for p in module.parameters()), name): module
        for name, module in model.named_modules()
        if isinstance(module, ModuleList) and any(each.startswith(f"{name}.") for each in names)
    }
    for _, stack in sorted(stacks.items()):
        if shape := _layer(stack[0]):
            of_vision = getattr(model.config, "vision_config", None)
            features = getattr(model.config, "vision_feature_layer", -1)  # those after it make nothing that is used
            unused = -1 - features if isinstance(features, int) and features < 0 else 0
            is_pixtral = getattr(of_vision, "model_type", "") == "pixtral"
            return replace(shape, num_layers=len(stack) - unused, has_mask=is_pixtral)
    return None


def _layer(layer: Any) -> Shape | None:
    """The shape of a layer; None if it has no attention.

    Parameters that are in no linear module and no norm count as vectors.
    """
    from torch import nn

    linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    attention = {name: m for name, m in linears.items() if _ATTENTION.search(name)}
    inputs = [m for name, m in attention.items() if _INPUTS.search(name)]
    outputs = [m for name, m in attention.items() if not _INPUTS.search(name)]
    mlp = [m for name, m in linears.items() if name not in attention]
    heads = [getattr(m, key) for m in layer.modules() for key in _HEADS if isinstance(getattr(m, key, None), int)]
    sizes = [m.head_dim for m in layer.modules() if isinstance(getattr(m, "head_dim", None), int)]
    if not (inputs and outputs and mlp and (heads or sizes)):
        return None
    found = {
        name: getattr(m, "weight", None) for name, m in layer.named_modules() if "norm" in type(m).__name__.lower()
    }
    norms = {name: weight.numel() for name, weight in found.items() if weight is not None}
    of_heads = [size for name, size in norms.items() if _ATTENTION.search(name)]
    f, q = mlp[-1].in_features, outputs[0].in_features
    head_dim = q // heads[0] if heads else sizes[0]
    kv = (sum(m.out_features for m in inputs) - q) // 2
    shape = Shape(
        name="tower",
        folder=None,
        num_layers=1,
        hidden_size=inputs[0].in_features,
        intermediate_size=f,
        num_heads=q // head_dim,
        num_kv_heads=kv // head_dim,
        head_dim=head_dim,
        vocab_size=0,
        max_positions=None,
        tied=True,
        num_norms=len(norms) - len(of_heads),
        norm_of_heads="" if not of_heads else "head" if of_heads[0] == head_dim else "all",
        gated=sum(m.out_features for m in mlp[:-1]) == 2 * f,
        kept_floats=0 if None not in found.values() else q + 2 * kv,  # values have a norm too (Gemma 4)
        layer_norm=any(isinstance(m, nn.LayerNorm) for m in layer.modules()),
        rotates_views=len(inputs) == 1 and "position_embeddings" in signature(layer.forward).parameters,
        own_linears=tuple(
            Linear(
                name.rpartition(".")[2],
                m.in_features,
                m.out_features,
                m.bias is not None,
                name.rpartition(".")[0] or ".",
            )
            for name, m in linears.items()
        ),
    )
    return replace(shape, own_vectors=sum(p.numel() for p in layer.parameters()) - shape.layer_parameters)


def _patches(config: Any) -> dict[str, Any]:
    """The fields of ``Tower`` that say how many patches and tokens an image has, or else a sound."""
    kind, values = config.model_type, config.to_dict()
    vision = values.get("vision_config")
    if not vision:  # of two frames a state, as of Whisper's encoder
        audio = values.get("audio_config") or values["encoder_config"]
        rate = _STATES_PER_TOKEN.get(kind, 1)
        return {
            "patches_per_token": rate,
            "values_per_patch": 2 * audio.get("num_mel_bins", 80),
            "image_tokens": audio.get("max_source_positions", 1500) // rate,
        }
    named = {**vision, **values}
    patch, side = _side(vision["patch_size"]), _side(vision.get("image_size"))
    merge = math.prod(_side(named[name]) for name in _MERGE if named.get(name))
    merge *= math.prod(round(1 / named[name]) for name in _RATIO if named.get(name))
    of_patch = {"values_per_patch": 3 * patch**2 * (vision.get("temporal_patch_size") or 1)}
    is_pixtral = vision.get("model_type") == "pixtral"
    if not side or is_pixtral or "spatial_merge_size" in named:  # an image has as many patches as its size gives
        window = vision.get("window_size")  # of all layers but few
        return of_patch | {
            "patches_per_token": merge**2,
            "patches_seen": (window // patch) ** 2 if window else None,
            "image_tokens": (side // (merge * patch)) ** 2 if is_pixtral else _LIMITS.get(kind, 16_384),
            "token_pixels": (merge * patch) ** 2,
        }
    seen = (side // patch) ** 2
    tokens = next((named[name] for name in _TOKENS if named.get(name)), seen // merge**2)
    pins = values.get("image_grid_pinpoints") or []
    tiles = 1 + max(height * width // side**2 for height, width in pins) if pins else _TILES.get(kind, 1)
    return of_patch | {
        "patches_per_token": max(1, seen // tokens),
        "patches_seen": seen,
        "image_tokens": tiles * tokens,
    }


def _side(size: Any) -> int:
    """A side of a square, of which some configs have both."""
    return size[0] if isinstance(size, list | tuple) else size or 0
