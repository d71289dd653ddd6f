"""Tiny models that read images, with random weights and processors made of their classes. Nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

TOKENIZER = Path(__file__).resolve().parents[1] / "recipes/tiny/model"
# Each image before the text, as the templates of these families have it.
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}
{%- if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}
{%- if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_SIZE = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}


def _qwen2_vl(ids: dict[str, int]) -> dict[str, Any]:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    return {"vision_config": vision, "text_config": _SHAPE | {"rope_parameters": _MROPE}, **_qwen_ids(ids)}


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2_5_vl(ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    return {"vision_config": vision, "text_config": _SHAPE | {"rope_parameters": _MROPE}, **_qwen_ids(ids)}


def _qwen3_vl(ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _SHAPE | {"head_dim": 8, "rope_parameters": _MROPE}
    return {"vision_config": vision, "text_config": text, **_qwen_ids(ids)}


def _llava(ids: dict[str, int]) -> dict[str, Any]:
    vision = {"model_type": "clip_vision_model", **_SIGLIP, "projection_dim": 16}
    text = {"model_type": "llama", **_SHAPE}
    return {"vision_config": vision, "text_config": text, "image_token_id": ids["<image>"]}


def _llava_next(ids: dict[str, int]) -> dict[str, Any]:
    return _llava(ids) | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}


def _llava_onevision(ids: dict[str, int]) -> dict[str, Any]:
    vision = {"model_type": "siglip_vision_model", **_SIGLIP, "vision_use_head": False}
    text = {"model_type": "qwen2", **_SHAPE}
    tokens = {"image_token_id": ids["<image>"], "video_token_id": ids["<video>"]}
    return {"vision_config": vision, "text_config": text, **tokens, **_PINS}


def _idefics2(ids: dict[str, int]) -> dict[str, Any]:
    text = {"model_type": "mistral", **_SHAPE}
    resampler = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2}
    resampler |= {"resampler_head_dim": 8, "num_key_value_heads": 2}
    parts = {"vision_config": _SIGLIP, "perceiver_config": resampler, "text_config": text}
    return {**parts, "image_token_id": ids["<image>"]}


def _internvl(ids: dict[str, int]) -> dict[str, Any]:
    vision = {**_SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]}
    text = {"model_type": "qwen2", **_SHAPE}
    return {"vision_config": vision, "text_config": text, "image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": 4}


def _gemma3(ids: dict[str, int]) -> dict[str, Any]:
    text = _SHAPE | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return {
        "vision_config": _SIGLIP | {"vision_use_head": False},  # as in Google's models
        "text_config": text,
        "mm_tokens_per_image": 4,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
    }


def _idefics3(ids: dict[str, int]) -> dict[str, Any]:
    text = {"model_type": "llama", **_SHAPE}
    return {"vision_config": _SIGLIP, "text_config": text, "scale_factor": 2, "image_token_id": ids["<image>"]}


_PINS: dict[str, Any] = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
_ROWS = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS]
_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
# Of each family: its config, the image processor's settings, the processor's, added tokens, what its template writes.
FAMILIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str], str]] = {
    "qwen2_vl": (_qwen2_vl, {"size": _SIZE}, {}, _QWEN, _QWEN_IMAGE),
    "qwen2_5_vl": (_qwen2_5_vl, {"size": _SIZE}, {}, _QWEN, _QWEN_IMAGE),
    "qwen3_vl": (_qwen3_vl, {"size": _SIZE, "patch_size": 14}, {}, _QWEN, _QWEN_IMAGE),
    "llava": (
        _llava,
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ["<image>"],
        "<image>",
    ),
    "llava_next": (
        _llava_next,
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, **_PINS},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ["<image>"],
        "<image>",
    ),
    "internvl": (
        _internvl,
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "<IMG_CONTEXT>",
    ),
    "gemma3": (
        _gemma3,
        {"size": {"height": 56, "width": 56}},
        {"image_seq_length": 4},
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "<start_of_image>",
    ),
    "llava_onevision": (
        _llava_onevision,
        {"size": {"height": 56, "width": 56}, **_PINS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ["<image>", "<video>"],
        "<image>",
    ),
    "idefics2": (
        _idefics2,
        {"size": {"longest_edge": 56, "shortest_edge": 56}, "do_image_splitting": False},
        {"image_seq_len": 4},
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
        "<image>",
    ),
    "idefics3": (_idefics3, _TILES, {"image_seq_len": 4}, _IDEFICS, "<image>"),
    "smolvlm": (_idefics3, _TILES, {"image_seq_len": 4}, _IDEFICS, "<image>"),
}


def make_vision_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` with random weights, its tokenizer and the settings of its processor."""
    config_of, of_images, of_processor, tokens, image = FAMILIES[family]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    names: dict[str, str] = {}
    if family == "gemma3":
        names = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2]}
    elif family == "internvl":
        names = {"context_image_token": tokens[0], "start_image_token": tokens[1], "end_image_token": tokens[2]}
        names["video_token"] = tokens[3]
    if names:
        tokenizer.init_kwargs["extra_special_tokens"] = names
        tokenizer._set_model_specific_special_tokens(names)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    config_class = transformers.AutoConfig.for_model(family).__class__
    settings = config_of(ids)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    settings["text_config"] = settings["text_config"] | {"vocab_size": len(tokenizer), **ends}
    config = config_class(**settings, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide what is not computed
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    types = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES[family]
    image_processor = {"image_processor_type": types["torchvision"], **of_images}
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"processor_class": PROCESSOR_MAPPING_NAMES[family], **of_processor}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    """A picture of random colours."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def write_rows(folder: Path, sizes: list[list[tuple[int, int]]], name: str = "train.jsonl") -> Path:
    """Write rows of conversations, each with images of these sizes (width, height); none for an empty list."""
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    for i, of_row in enumerate(sizes):
        parts: list[dict[str, str]] = []
        for k, size in enumerate(of_row):
            picture(100 * i + k, *size).save(folder / f"{i}-{k}.png")
            parts.append({"type": "image", "path": f"{i}-{k}.png"})
            parts.append({"type": "text", "text": f"picture {k} "})
        question = [*parts, {"type": "text", "text": f"what is number {i}?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"tea and {i} " * (1 + i % 3)},
        ]
        rows.append({"messages": messages})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name
