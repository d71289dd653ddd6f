"""Tiny models that read images, of every class that transformers has for images and text, with working processors.

Weights are random and nothing is downloaded. A config is its class's own, with small numbers by the names of its keys;
the tokenizer is the one of recipes/tiny with the tokens that the processor's source asks for; the processor is the
family's own with small images. What a family needs besides is its line in ``FAMILIES``.

Some processors need torchvision (``needs_torchvision``), and so do those made of a model for timm.
"""

import inspect
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_families import SPECIAL, merged_values, small_values
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

TOKENIZER = Path(__file__).resolve().parents[1] / "recipes/tiny/model"
# Media where they stand in the content.
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}
{%- if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}
{%- if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
POSITIONS = 4096


@dataclass
class Family:
    """What names do not show.

    Attributes:
        image: what the template writes for an image; the processor's ``image_token`` if empty; None: nothing.
        tokens: further added tokens.
        names: of the tokenizer's tokens: ``tokenizer.image_token``.
        config: keys of the config; those of a part in a dict under the part's name.
        images: settings of the image processor.
        processor: settings of the processor.
        ids: keys of the config for token ids, and the token of each.
        image_processor: class of the image processor, if transformers has none for the family.
        processor_class: class of the processor, likewise.
        torchvision: whether its processor needs it, beside the image processor.
        parts: settings of further parts of the processor.
        model_type: of the config, if the line is for a variant of another family.
    """

    image: str | None = ""
    tokens: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    image_processor: str = ""
    processor_class: str = ""
    torchvision: bool = False
    model_type: str = ""
    parts: dict[str, Any] = field(default_factory=dict)


_VISION = "<|vision_start|><|image_pad|><|vision_end|>"
_VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_VISION_IDS = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "video": "<|video_pad|>"}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _qwen(text: dict[str, Any], vision: dict[str, Any], top: dict[str, Any] | None = None, **settings: Any) -> Family:
    config = {"text_config": text, "vision_config": vision} | (top or {})
    return Family(_VISION, _VISION_TOKENS, config=config, ids=dict(_VISION_IDS), **settings)


_VISUAL = {"deepstack_visual_indexes": [0, 1], "depth": 3}
_QWEN35 = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
_PINS = [[56, 112], [112, 56], [112, 112]]
_BEGIN = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_IDS = {"image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>"}
_PART = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GEMMA4_VISION = _PART | {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 16, "position_embedding_size": 64}
_OMNI = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|boa|>", "eoa_token": "<|eoa|>"}


def _glm(**settings: Any) -> Family:
    return Family(_BEGIN, [], {"image_token": "<|image|>"}, ids=dict(_GLM_IDS), **settings)


FAMILIES: dict[str, Family] = {
    "aria": Family(
        config={
            "projector_patch_to_query_dict": {4900: 8, 1225: 8},
            "vision_config": {"image_size": 980, "patch_size": 14, "num_attention_heads": 1, "num_hidden_layers": 1},
        },
        images={"size": None},
        processor={"size_conversion": {490: 8, 980: 8}},
    ),
    "aya_vision": Family(processor={"patch_size": 14, "img_size": 56, "downsample_factor": 2}),
    "cohere2_vision": Family(
        config={"vision_config": {"image_size": 128, "patch_size": 16}},
        images={"patch_size": 4, "size": {"height": 128, "width": 128}},
    ),
    "cohere_compass": Family(
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        ids={"vision_start": "<|VISION_START|>", "vision_end": "<|VISION_END|>"},
        config={
            "text_config": {"rope_parameters": {"full_attention": _ROPE}},
            "vision_config": _VISUAL,
        },
    ),
    "cosmos3_edge": _qwen({"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}, {}),
    "cosmos3_omni": _qwen(_MROPE, _VISUAL, processor_class="Qwen3VLProcessor"),
    "deepseek_vl": Family(processor={"num_image_tokens": 16}),
    "ernie4_5_vl_moe": Family("<|image_start|><|image|><|image_end|>"),
    "exaone4_5": _qwen({}, {"fullatt_block_indexes": [1], "window_size": 56}),
    "fuyu": Family(None, torchvision=True),
    "gemma3": Family(config={"mm_tokens_per_image": 4}, processor={"image_seq_length": 4}),
    "gemma4": Family(
        names=_AUDIO,
        config={"vision_config": _GEMMA4_VISION, "text_config": {"hidden_size_per_layer_input": 8}},
        images={"max_soft_tokens": 70},
    ),
    "glm46v": _glm(),
    "glm4v": _glm(),
    "glm4v_moe": _glm(image_processor="Glm4vImageProcessor"),
    "glm_ocr": _glm(image_processor="Glm46VImageProcessor", processor_class="Glm46VProcessor"),
    "glmga": _glm(processor_class="Glm46VProcessor"),
    "got_ocr2": Family(
        config={"vision_config": {"image_size": 1024, "global_attn_indexes": []}},
        images={"size": {"height": 1024, "width": 1024}},
    ),
    "granite4_vision": Family(
        processor=_LLAVA | {"downsample_rate": "1/2"},
        config={
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 0]],
            "image_grid_pinpoints": _PINS,
            "spatial_target_layers": [1],
            "vision_config": {"patch_size": 14, "image_size": 56, "hidden_size": 64},
            "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
        },
    ),
    "hunyuan_vl": Family(
        "<|image_start|><|image|><|image_end|>",
        config={"text_config": {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}}},
    ),
    "hy_v4_vl": _qwen({"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}, {}),
    "hyperclovax_vision_v2": _qwen({}, {"fullatt_block_indexes": [1], "window_size": 56}),
    "idefics3": Family(
        tokens=[f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
        images={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        config={"vision_config": {"image_size": 56, "patch_size": 14}},
        processor={"image_seq_len": 4},
    ),
    "internvl": Family(
        "<IMG_CONTEXT>", names={"context_image_token": "<IMG_CONTEXT>"}, processor={"image_seq_length": 4}
    ),
    "janus": Family(processor={"num_image_tokens": 16}),
    "kimi_k25": Family(images={"size": {"max_height": 56, "max_width": 56}}),
    "llava": Family(processor=_LLAVA),
    "llava_next": Family(processor=_LLAVA, config={"image_grid_pinpoints": _PINS}),
    "llava_next_video": Family(processor=_LLAVA, config={"image_grid_pinpoints": _PINS}),
    "llava_onevision": Family(
        processor=_LLAVA
        | {"vision_feature_select_strategy": "full", "num_image_tokens": 16, "num_additional_image_tokens": 0},
        config={"image_grid_pinpoints": _PINS},
    ),
    "minicpmv4_6": Family(
        config={
            "image_token_id": "<|image|>",
            "insert_layer_id": 0,
            "vision_config": {"insert_layer_id": 0},
            "text_config": _QWEN35,
        },
        torchvision=True,
    ),
    "minicpmv4_7": Family(
        config={
            "image_token_id": "<|image|>",
            "insert_layer_id": 0,
            "vision_config": {"insert_layer_id": 0},
            "text_config": _QWEN35,
        },
        torchvision=True,
    ),
    "mistral3": Family(torchvision=True, processor={"patch_size": 14, "spatial_merge_size": 2}),
    "mistral_large4": Family(torchvision=True, processor={"patch_size": 14, "spatial_merge_size": 2}),
    "mllama": Family(
        config={
            "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
            "text_config": {"cross_attention_layers": [1]},
        }
    ),
    "muse_glimmer": Family(config={"out_hidden_size": 128}),
    "ovis2": Family(processor={"image_seq_length": 16}),
    "paddleocr_vl": Family(
        "<|IMAGE_START|><|IMAGE|><|IMAGE_END|>",
        names={"image_token": "<|IMAGE|>"},
        ids={"vision_start": "<|IMAGE_START|>", "vision_end": "<|IMAGE_END|>"},
        config={"text_config": _MROPE},
    ),
    "paligemma": Family(images={"image_seq_length": 16}, config={"projection_dim": 32, "hidden_size": 32}),
    "qianfan_ocr": Family("<image>", processor={"image_seq_length": 4}),
    "qwen2_5_omni_thinker": _qwen(
        _MROPE,
        {"fullatt_block_indexes": [1], "window_size": 56},
        names=_OMNI,
        processor_class="Qwen2_5OmniProcessor",
        image_processor="Qwen2VLImageProcessor",
        top={"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    ),
    "qwen3_omni_moe_thinker": _qwen(
        _MROPE,
        _VISUAL,
        names=_OMNI,
        processor_class="Qwen3OmniMoeProcessor",
        image_processor="Qwen2VLImageProcessor",
        top={"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    ),
    "qwen2_vl": _qwen(_MROPE, {"embed_dim": 32, "num_heads": 2}),
    "qwen2_5_vl": _qwen(_MROPE, {"fullatt_block_indexes": [1], "window_size": 56}),
    "qwen3_vl": _qwen(_MROPE, _VISUAL),
    "qwen3_vl_moe": _qwen(_MROPE, _VISUAL, image_processor="Qwen2VLImageProcessor"),
    "qwen3_5": _qwen(_QWEN35, {}),
    "qwen3_5_moe": _qwen(_QWEN35, {}),
    "qwen4_exp": _qwen(
        _QWEN35
        | {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
        {},
    ),
    "deepseek_vl_hybrid": Family(
        images={"high_res_size": {"height": 64, "width": 64}}, processor={"num_image_tokens": 16}
    ),
    "dots3_note": Family(
        "<|img|><|imgpad|><|endofimg|>", ["<|img|>", "<|endofimg|>"], images={"temporal_patch_size": 1}
    ),
    "gemma4_unified": Family(
        names=_AUDIO,
        config={
            "vision_config": {
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "mm_embed_dim": 32,
                "mm_posemb_size": 64,
                "output_proj_dims": 32,
            }
        },
        images={"max_soft_tokens": 70},
    ),
    "glm5_next": _glm(),
    "granite_docling": Family(
        processor={"image_seq_len": 4}, config={"vision_config": {"deepstack_visual_indexes": [0], "scale_factor": 2}}
    ),
    "lfm3_vl": _qwen({"layer_types": ["conv", "full_attention"]}, {"layer_types": ["conv", "full_attention"]}),
    "llama4": Family(config={"vision_config": {"intermediate_size": 128, "vision_output_dim": 32}}),
    "minicpm_ocr": Family(
        config={
            "image_token_id": "<|image|>",
            "insert_layer_id": 0,
            "vision_config": {"insert_layer_id": 0},
            "text_config": _QWEN35,
        },
        torchvision=True,
    ),
    "minimax_m3_vl": Family(
        tokens=["]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["],
        config={"merged_hidden_size": 128},
    ),
    "molmo2": Family(
        config={
            "image_patch_id": "<im_patch>",
            "image_start_token_id": "<im_start>",
            "image_end_token_id": "<im_end>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "adapter_config": {"vision_feature_layer": [1, 0]},
            "vision_config": {"image_size": [168, 168], "num_position_embeddings": 144},
        },
        images={"size": {"height": 168, "width": 168}},
    ),
    "pp_chart2table": Family("<imgpad>", ["<imgpad>"]),
    "fast_vlm": Family(processor_class="LlavaProcessor", image_processor="CLIPImageProcessor", torchvision=True),
    "gemma3n": Family(
        names=_AUDIO,
        torchvision=True,
        config={
            "vision_config": {"hidden_size": 2048, "architecture": "mobilenetv5_base"},
            "vision_soft_tokens_per_image": 256,
            "text_config": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    "perception_lm": Family(torchvision=True),
    "llava_pixtral": Family(
        model_type="llava",
        processor_class="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        torchvision=True,
        config={
            "vision_config": _PART
            | {
                "model_type": "pixtral",
                "head_dim": 8,
                "patch_size": 14,
                "image_size": 224,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            },
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        images={"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 56}},
        processor={"patch_size": 14},
    ),
    "gemma4_bidirectional": Family(
        model_type="gemma4",
        names=_AUDIO,
        config={
            "vision_config": _GEMMA4_VISION,
            "text_config": {"hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision"},
        },
        images={"max_soft_tokens": 70},
    ),
    "phi4_multimodal": Family(
        images={"size": {"height": 448, "width": 448}},
        model_type="phi4_multimodal",
        torchvision=True,
        config={
            "vision_config": {"crop_size": 448, "image_size": 448, "image_token_id": "<|image|>"},
            "audio_config": {
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 32,
                "num_blocks": 1,
                "audio_token_id": "<|audio|>",
            },
        },
        parts={"feature_extractor": {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}},
    ),
    "vipllava": Family(processor=_LLAVA, config={"vision_feature_layer": [-1, -2]}),
}
FAMILIES["smolvlm"] = FAMILIES["idefics3"]
# Not chat models of one decoder: what they are in place of it.
OTHERS = {
    **dict.fromkeys(
        ("florence2", "pix2struct", "t5gemma2", "udop", "vision-encoder-decoder", "pp_formulanet"),
        "an encoder for the text",
    ),
    **dict.fromkeys(
        ("blip", "blip-2", "git", "pp_chart2table", "kosmos-2", "kosmos-2.5", "idefics"),
        "an image in every row, outside of its text",
    ),
    "diffusion_gemma": "text by diffusion",
    "evolla": "proteins",
    "instructblip": "two tokenizers",
    "instructblipvideo": "videos",
    "mistral4": "text alone",
    "pi0": "actions of robots",
    "shieldgemma2": "classes",
}


def families() -> list[str]:
    """Return every family that transformers has a class for images and text of, and variants of some."""
    return [
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *(name for name, known in FAMILIES.items() if known.model_type),
    ]


def needs_torchvision(family: str) -> bool:
    """Return whether the family's image processor has no other form than one with torchvision."""
    known = FAMILIES.get(family, Family())
    if known.torchvision:
        return True
    family = known.model_type or family
    if known.image_processor:
        return not hasattr(transformers, f"{known.image_processor}Pil")
    return "pil" not in (IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {"pil": ""})


def make_model(family: str, folder: Path) -> Path:
    """Write a tiny random model of the family, its tokenizer and the settings of its processor.

    Raises whatever the family's code raises if it cannot be made so.
    """
    known = FAMILIES.get(family, Family())
    tokenizer, names = _tokenizer(family, known)
    tokenizer.save_pretrained(folder)
    values = _config_values(family, known, tokenizer, names)
    class_of_images = known.image_processor or _image_processor_class(family)
    config = CONFIG_MAPPING[known.model_type or family](**values)
    sizes = _small_images(class_of_images, config.to_dict())
    of_images = {"image_processor_type": class_of_images, **sizes, **known.images}
    (folder / "preprocessor_config.json").write_text(json.dumps(of_images))
    of_processor = {"processor_class": _processor_class(family).__name__, **known.processor, **known.parts}
    (folder / "processor_config.json").write_text(json.dumps(of_processor))
    config.save_pretrained(folder)  # for the processor
    processor = open_processor(folder)
    tokenizer = processor.tokenizer  # it may have added tokens
    image = "" if known.image is None else known.image or str(processor.image_token)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    tokenizer.save_pretrained(folder)
    known.ids.setdefault("image", _placeholder(processor, image))  # also for keys such as image_token_index
    values = _config_values(family, known, tokenizer, names)
    config = CONFIG_MAPPING[known.model_type or family](**values)
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide what is not computed
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def model_class(config: Any) -> Any:
    """Return the auto class of transformers for the family."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForMultimodalLM


def open_processor(folder: Path) -> Any:
    """Open the processor of a folder as transformers does, without a part for videos where that needs torchvision."""
    name = json.loads((folder / "processor_config.json").read_text())["processor_class"]
    processor_class = getattr(transformers, name)
    if "torchvision" in sys.modules:
        return transformers.AutoProcessor.from_pretrained(folder)
    still: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _any_class})
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    settings, _ = still.get_processor_dict(folder)
    return still.from_args_and_dict([parts.get(each) for each in still.get_attributes()], settings)


def _any_class(self: Any, name: str, argument: Any) -> None:
    """Replaces a check of transformers that imports what videos need."""


def _processor_class(family: str) -> Any:
    known = FAMILIES.get(family, Family())
    return getattr(transformers, known.processor_class or PROCESSOR_MAPPING_NAMES[known.model_type or family])


def _image_processor_class(family: str) -> str:
    types = IMAGE_PROCESSOR_MAPPING_NAMES[FAMILIES.get(family, Family()).model_type or family]
    return types.get("torchvision") or types["pil"]


def _tokenizer(family: str, known: Family) -> tuple[Any, dict[str, str]]:
    """The tokenizer with what the processor's source asks for: tokens in quotes, and attributes of the tokenizer."""
    source = inspect.getsource(_processor_class(family))
    literals = re.findall(r"""["'](<[^<>"'\\ ]+>|\[IMG\w*\]|\|[A-Z]+\|)["']""", source)
    asked = set(re.findall(r"tokenizer\.(\w+_token)(?:_id)?\b", source)) - {"bos_token", "eos_token", "pad_token"}
    defaults = dict(re.findall(r"""tokenizer, ["'](\w+_token)["'], ["']([^"']+)["']""", source))
    optional = set(re.findall(r"""(?:has|get)attr\(tokenizer, ["'](\w+_token)(?:_id)?["']""", source))
    names = {
        name: f"<|{name.removesuffix('_token')}|>" for name in sorted(asked - optional - {"unk_token", "sep_token"})
    }
    names = {name: token for name, token in (names | defaults).items() if name not in ("bos_token", "eos_token")}
    names |= known.names
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokens = dict.fromkeys([*names.values(), *literals, *known.tokens, *known.ids.values()])
    tokenizer.add_tokens([token for token in tokens if isinstance(token, str)], special_tokens=True)
    if names:
        tokenizer.init_kwargs["extra_special_tokens"] = names
        tokenizer._set_model_specific_special_tokens(names)
    return tokenizer, names


def _placeholder(processor: Any, image: str) -> str:
    """The token that an image is most of."""
    inputs = processor(text=[image], images=[_blank()], add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    return processor.tokenizer.convert_ids_to_tokens(max(set(ids), key=ids.count))


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (70, 50))


# Names of numbers in the configs of encoders, beside those of texts.
COMMON = set(transformers.PreTrainedConfig().to_dict()) - {"model_type"}
VISION_SIZES: list[tuple[str, Any]] = [
    (r"adapter_input_size|codebook_dim|conv_output_size", 32),
    (r"projection_dim|output_channels|\w*output_dim|projector_input_dim|\w*adapter_(in|out)_dim|downsample_dim", 32),
    (r"embed_dim|patch_embed_hidden_size", 32),
    (r"mlp_dim", 48),
]


def _config_values(family: str, known: Family, tokenizer: Any, names: dict[str, str]) -> dict[str, Any]:
    """The arguments of the family's config: small numbers, the ids of tokens, and what its line says."""
    vocabulary = tokenizer.get_vocab()
    tokens = {**names, **known.ids}
    ends = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}

    def fit(default: dict[str, Any], changed: dict[str, Any], name_of_part: str) -> dict[str, Any]:
        """What to give a config in place of ``default``: ``changed``, and more."""
        is_text = not re.search("vision|audio|qformer|vq|perceiver|sam", name_of_part)
        fitted = dict(changed)
        for name, value in default.items():
            stem = re.sub(r"_(token_)?(id|index)$", "", name)
            if isinstance(value, dict) and name.endswith("config"):
                # A part may have defaults of its own in this family.
                scalars = {key: each for key, each in value.items() if isinstance(each, str | int | float)}
                own = {key: each for key, each in scalars.items() if key not in COMMON and not key.startswith("_")}
                fitted[name] = own | fit(value, changed.get(name) or {}, name)
            elif re.fullmatch(r"vocab_size(_per_layer_input)?", name) and value:
                fitted[name] = len(tokenizer)
            elif name != stem and isinstance(value, int):
                token = tokens.get(stem) or tokens.get(f"{stem}_token")
                fitted[name] = vocabulary[token] if token in vocabulary else ends.get(stem, changed.get(name, value))
            elif is_text and re.fullmatch(r"max_position_embeddings|n_positions", name) and value:
                fitted[name] = POSITIONS
            elif re.fullmatch(r"\w*sliding_window(_size)?|attention_chunk_size", name) and value:
                fitted[name] = 24  # an answer is to see its image, and not all rows of a pack
            elif re.fullmatch(r"index_topk", name) and value:
                fitted[name] = POSITIONS  # of equal ones, either may be left out
            elif name == "output_router_logits":
                fitted[name] = False  # a row's loss would depend on the rows beside it
            elif not is_text and isinstance(value, int) and not isinstance(value, bool):
                sizes = (size for pattern, size in VISION_SIZES if re.fullmatch(pattern, name))
                if (size := next(sizes, None)) is not None:
                    fitted[name] = size
        patch, side = (changed.get(name, default.get(name)) for name in ("patch_size", "image_size"))
        if isinstance(side, int) and isinstance(patch, int):
            fitted["image_size"] = 4 * patch
        elif isinstance(side, list | tuple) and patch:
            fitted["image_size"] = [4 * (patch if isinstance(patch, int) else patch[0])] * 2
        return fitted

    default = CONFIG_MAPPING[known.model_type or family]().to_dict()
    changed = merged_values(small_values(default, family), SPECIAL.get(family, {}))
    values = merged_values(fit(default, merged_values(changed, known.config), ""), known.config)

    def named(part: dict[str, Any]) -> dict[str, Any]:
        """Tokens in place of their ids are replaced."""
        return {
            key: named(value)
            if isinstance(value, dict) and key.endswith("_config")
            else vocabulary[value]
            if isinstance(value, str) and key.endswith("_id") and value in vocabulary
            else value
            for key, value in part.items()
        }

    return named(values)


def _small_images(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Settings of an image processor for small images, with the patches of the config."""
    settings = getattr(transformers, name, None) or getattr(transformers, f"{name}Pil")
    settings = (getattr(transformers, f"{name}Pil", settings))().to_dict()
    vision = next((part for key, part in values.items() if key.startswith("vision") and isinstance(part, dict)), values)
    patch = vision.get("patch_size") or 14
    side = vision.get("image_size") or 4 * (patch if isinstance(patch, int) else patch[0])
    side = side if isinstance(side, int) else side[0]
    small_ones: dict[str, Any] = {}
    size = settings.get("size")
    if isinstance(settings.get("patch_size"), int) and isinstance(patch, int):
        small_ones["patch_size"] = patch
    elif isinstance(settings.get("patch_size"), dict) and isinstance(patch, int):
        small_ones["patch_size"] = {"height": patch, "width": patch}
    if isinstance(size, dict) and "merge_size" in settings:
        unit = (patch * settings["merge_size"]) ** 2
        small_ones["size"] = {"shortest_edge": unit, "longest_edge": 12 * unit}
    elif isinstance(size, dict):
        small_ones["size"] = dict.fromkeys(size, side)
    if isinstance(settings.get("crop_size"), dict):
        small_ones["crop_size"] = dict.fromkeys(settings["crop_size"], side)
    if settings.get("image_grid_pinpoints"):
        small_ones["image_grid_pinpoints"] = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    return small_ones
