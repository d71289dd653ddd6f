"""Vision towers (encoders) of vision-language models: their shapes, from the values of a config.json.

Promises: the numbers of parameters are exact. To the formulas a layer of a tower is one of a decoder, over patches.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kit.memory.shape import Shape, Tower

_TILES = 17  # of an image at most, with the whole of it, as the processors of Idefics 3 and SmolVLM cut it


def _qwen(vision: Mapping[str, Any], text_size: int, gated: bool) -> Tower:
    """Patches of two frames, of which four are a token. Qwen 2.5's layers but few attend to windows of 8 x 8."""
    merge, patch = vision.get("spatial_merge_size", 2), vision.get("patch_size", 14)
    h = vision["hidden_size"] if gated else vision["embed_dim"]
    f = vision["intermediate_size"] if gated else int(h * vision.get("mlp_ratio", 4))
    layers = _layers(vision["depth"], h, f, vision["num_heads"], gated, rotates_views=True)
    values = 3 * vision.get("temporal_patch_size", 2) * patch**2
    wide = h * merge**2
    token_pixels = (merge * patch) ** 2
    return Tower(
        layers=layers,
        other_parameters=values * h,
        projector_weights=wide * (wide + text_size),
        projector_vectors=wide + text_size + (1 if gated else 2) * h,
        patches_per_token=merge**2,
        values_per_patch=values,
        patches_seen=(vision.get("window_size", 112) // patch) ** 2 if gated else None,
        image_tokens=12_845_056 // token_pixels,  # the processors' own limit
        token_pixels=token_pixels,
    )


def _qwen3(values: Mapping[str, Any], text_size: int) -> Tower:
    """Patches of two frames, of which four are a token. Some layers have a merger of their own (DeepStack)."""
    vision = values["vision_config"]
    merge, patch, h = vision.get("spatial_merge_size", 2), vision.get("patch_size", 16), vision["hidden_size"]
    wide, pixels = h * merge**2, 3 * vision.get("temporal_patch_size", 2) * patch**2
    deep = 0 if values["model_type"] == "qwen3_5" else len(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    token_pixels = (merge * patch) ** 2
    return Tower(
        layers=_layers(vision["depth"], h, vision["intermediate_size"], vision["num_heads"], False, rotates_views=True),
        other_parameters=pixels * h + h + vision.get("num_position_embeddings", 2304) * h,
        projector_weights=(1 + deep) * wide * (wide + text_size),
        projector_vectors=2 * h + 2 * deep * wide + (1 + deep) * (wide + text_size),
        patches_per_token=merge**2,
        values_per_patch=pixels,
        patches_seen=None,
        # The processor's own limit. The kit does not train Qwen3.5 on images.
        image_tokens=16_777_216 // token_pixels if values["model_type"] == "qwen3_vl" else 0,
        token_pixels=token_pixels if values["model_type"] == "qwen3_vl" else None,
    )


def _without_images(layers: Shape, other_parameters: int, projector_weights: int, projector_vectors: int) -> Tower:
    """A vision encoder whose weights are there, and that no row of the kit reaches."""
    return Tower(
        layers=layers,
        other_parameters=other_parameters,
        projector_weights=projector_weights,
        projector_vectors=projector_vectors,
        patches_per_token=1,
        values_per_patch=1,
        patches_seen=None,
        image_tokens=0,
    )


def _mistral3(values: Mapping[str, Any], text_size: int) -> Tower:
    vision = values["vision_config"]
    h, merge = vision["hidden_size"], values.get("spatial_merge_size", 2)
    layers = _plain_layers(
        vision["num_hidden_layers"], h, vision["intermediate_size"], vision["num_attention_heads"], num_norms=2
    )
    projector = h * merge**2 * h + h * text_size + text_size**2
    return _without_images(layers, 3 * vision["patch_size"] ** 2 * h + h, projector, h)


def _gemma4(values: Mapping[str, Any], text_size: int) -> Tower:
    vision, audio = values["vision_config"], values.get("audio_config")
    h = vision["hidden_size"]
    layers = _plain_layers(
        vision["num_hidden_layers"], h, vision["intermediate_size"], vision["num_attention_heads"], num_norms=4
    )
    layers = replace(layers, norm_of_heads="head")
    patches = 3 * vision["patch_size"] ** 2 * h  # a linear module
    projector, last = h * text_size, 0
    if audio:
        linear, last = _gemma4_audio(audio)
        projector, last = projector + linear, last + audio["output_proj_dims"] * text_size
    else:
        projector, last = 0, projector
    # transformers keeps the last linear module out of 4 bits.
    return _without_images(layers, 2 * vision["position_embedding_size"] * h, patches + projector, last)


def _gemma4_audio(audio: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of the linear modules of Gemma 4's audio encoder, and its other parameters."""
    h, layers, heads = audio["hidden_size"], audio["num_hidden_layers"], audio["num_attention_heads"]
    first, second = audio["subsampling_conv_channels"]
    output, kernel = audio["output_proj_dims"], audio.get("conv_kernel_size", 5)
    in_layer = 16 * h * h + 5 * h * h + 3 * h * h  # two feed-forward parts, attention, and what is around a convolution
    vectors = layers * (9 * h + h // heads + kernel * h) + 9 * first + first + 9 * first * second + second + output
    return layers * in_layer + second * 32 * h + h * output, vectors


def _of_squares(
    vision: Mapping[str, Any], tokens: int, most_images: int, projector: tuple[int, int], other: int = 0
) -> Tower:
    """A square of patches (SigLIP, CLIP), of which a number of tokens is made.

    Args:
        most_images: squares of an image, at most.
        projector: its weights in linear modules, and its other parameters.
        other: parameters other than those of patches, positions and a last norm.
    """
    h, patch = vision["hidden_size"], vision["patch_size"]
    num_patches = (vision["image_size"] // patch) ** 2
    values = 3 * patch**2
    return Tower(
        layers=_layers(
            vision["num_hidden_layers"], h, vision["intermediate_size"], vision["num_attention_heads"], False
        ),
        other_parameters=values * h + h + num_patches * h + 2 * h + other,
        projector_weights=projector[0],
        projector_vectors=projector[1],
        patches_per_token=num_patches // tokens,
        values_per_patch=values,
        patches_seen=num_patches,
        image_tokens=most_images * tokens,
    )


def _gemma3(values: Mapping[str, Any], text_size: int) -> Tower:
    vision = values["vision_config"]
    h, f = vision["hidden_size"], vision["intermediate_size"]
    # SigLIP's own head, which Gemma's files leave out, and which makes nothing that is used.
    head = 4 * h * h + 2 * h * f + 8 * h + f if vision.get("vision_use_head", True) else 0
    return _of_squares(vision, values.get("mm_tokens_per_image", 256), 1, (0, h * text_size + h), other=head)


def _idefics3(values: Mapping[str, Any], text_size: int) -> Tower:
    vision = values["vision_config"]
    scale = values.get("scale_factor", 2) ** 2
    tokens = (vision["image_size"] // vision["patch_size"]) ** 2 // scale
    return _of_squares(vision, tokens, _TILES, (vision["hidden_size"] * scale * text_size, 0))


def _llava(values: Mapping[str, Any], text_size: int) -> Tower:
    vision = values["vision_config"]
    h = vision["hidden_size"]
    tokens = (vision["image_size"] // vision["patch_size"]) ** 2
    # CLIP has a token of its own with a position, a norm before the layers, and no bias of patches.
    return _of_squares(vision, tokens, 1, (h * text_size + text_size**2, 2 * text_size), other=2 * h + 2 * h - h)


def _layers(
    number: int, hidden_size: int, intermediate_size: int, heads: int, gated: bool, rotates_views: bool = False
) -> Shape:
    return Shape(
        name="tower",
        folder=None,
        num_layers=number,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden_size // heads,
        vocab_size=0,
        max_positions=None,
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=gated,
        layer_norm=not gated,
        rotates_views=rotates_views,
    )


def _plain_layers(number: int, hidden_size: int, intermediate_size: int, heads: int, num_norms: int) -> Shape:
    """Layers without biases, as those of a text."""
    return replace(
        _layers(number, hidden_size, intermediate_size, heads, gated=True),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        num_norms=num_norms,
    )


# By the model's type: what reads its config's values and the size of the text's states.
TOWERS: dict[str, Callable[[Mapping[str, Any], int], Tower]] = {
    "qwen2_vl": lambda values, text_size: _qwen(values["vision_config"], text_size, gated=False),
    "qwen2_5_vl": lambda values, text_size: _qwen(values["vision_config"], text_size, gated=True),
    "qwen3_vl": _qwen3,
    "qwen3_5": _qwen3,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
}
