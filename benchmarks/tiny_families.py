"""Tiny models of the causal families of transformers: random weights and buffers, the family's own structure."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from kit.model.pretrained.classes import auto_class

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, HIDDEN, LAYERS, HEADS, EXPERTS = 160, 32, 2, 4, 4

# The size of a number in a config, by its name. The first pattern that matches a whole name counts.
SIZES: list[tuple[str, Any]] = [
    (r"(un)?(padded_|decoder_)?vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"num_experts_per_(tok|token)|moe_k|moe_topk|num_experts_per_topk|top_k_experts|topk_experts", 2),
    (r"num_shared_experts|n_shared_experts|moe_num_shared_experts", 1),
    (r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num|num_moe_experts", EXPERTS),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups", 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers|first_k_dense_replace", 0),
    (r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|num_(de|en)coder_layers|num_blocks|depth", LAYERS),
    (r"conf_num_hidden_layers|num_global_layers|num_layers_per_stack", 1),
    (r"num_key_value_heads|num_kv_heads|num_query_groups|swa_num_key_value_heads|multi_query_group_num", 2),
    (r".*attention_heads|n_heads?|num_heads|attention_heads|(linear|swa|index)_n(um)?_(\w+_)?heads", HEADS),
    (r"\w*mamba\w*_heads", HEADS),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"_?sliding_window_pattern|full_attention_interval|global_attn_every_n_layers|layer_group_size", 2),
    (r"(attn|expert)_layer_period|no_rope_layer_interval|(global_attn|moe)_every_n_layers", 2),
    (r"attn_layer_offset|moe_layer_(start|end)_index", 1),
    (r"qk_head_dim", None),  # follows from others
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|laurel_rank|adapter_rank|gated_norm_rank|rel_rank", 16),
    (r"(\w*_)?head_dim|d_head|kv_channels|attention_head_size|dim_head|v_head_dim", 8),
    (r"hidden_size_per_layer_input|embed_dim_per_layer", 8),
    (r"(\w*_)?(intermediate|ffn|ff|inner|ssm)(_\w*)?(size|dim)|ffn_dim|dff|dim_ff|d_inner|mlp_dim|mamba_d_ssm", 64),
    (r"moe_dim|intermediate_size_mlp|expert_ffn_hidden_size|ffn_hidden_size|feed_forward_size", 64),
    (r"(\w*_)?hidden_size(_global)?|d_model|n_embd|dim_model_base|emb_dim|embedding_dim|lru_width", HIDDEN),
    (r"(input_|output_)?embedding_size|word_embed_proj_dim|ple_embed_dim", HIDDEN),
    (r"rotary_dim", 4),
    (r"\w*(position_embeddings|source_positions|target_positions|n_positions|n_ctx)|max_seq_len", 64),
    (r"(mamba_|ssm_)?(d_)?state(_size)?|chunk_size|mamba_chunk_size|mamba_d_state", 16),
    (r"(time_step|mamba_dt)_rank", 4),
    (r"index_topk|index_block_size|floor_scale|attention_chunk_size", 8),  # less than a pack
    (r"\w*sliding_window(_size)?|window_size|attention_window_size|keep_window_size|local_attention", 8),
]
# What a name does not show, per family: keys of the text model's config, and of its parts by the name of the part.
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_MROPE = {"text_config": {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]}}}
_IMAGES_AS_TOKENS = {"vocabulary_map": {"<image>": 150, "<|extra_200|>": 151, "IMGIMGA": 152}}
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE["rope_parameters"]}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": EXPERTS},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"], "num_hidden_layers": 2}
    | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "max_window_layers": 1},
    **dict.fromkeys(
        ("glm46v", "glm4v", "glmga", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), _MROPE
    ),
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}},
    "chameleon": _IMAGES_AS_TOKENS,
    "emu3": _IMAGES_AS_TOKENS,
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]}}},
    "mistral4": {"head_dim": 4},
    "qwen2_vl": _MROPE | {"vision_config": {"embed_dim": HIDDEN}},
    "falcon_h1": {"mamba_d_head": 16},
    "flint": {"num_hidden_layers": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": _ROPE | {"head_dim": 8},
    "hunyuan_v1_moe": _ROPE | {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": HEADS, "head_dim": 16, "expand": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_topk_blocks": 2},
    "ministral": _ROPE | {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "rwkv": {"rescale_every": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
}


def tiny_config(family: str) -> Any:
    """Return a config of the family, small, without dropout, with the family's own structure."""
    config_class = CONFIG_MAPPING[family]
    return config_class(**merged_values(small_values(config_class().to_dict(), family), SPECIAL.get(family, {})))


def merged_values(values: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """``values`` with those of ``special``, also in the configs of parts."""
    merged = {
        name: merged_values(values[name], value)
        if name.endswith("_config") and isinstance(values.get(name), dict)
        else value
        for name, value in special.items()
    }
    return values | merged


def small_values(values: dict[str, Any], family: str) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("config") and name != "quantization_config":
            small[name] = small_values(value, family)
        elif re.search(r"drop(out|_rate|_prob|ped)?|_pdrop|layerdrop|jitter", name) and isinstance(value, float):
            small[name] = 0.0
        elif re.search(r"_token_(id|index)$", name) and isinstance(value, int):
            small[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], 130 + sum(map(ord, name)) % 30)
        elif name == "no_rope_layers" and value:
            small[name] = [1, 0]
        elif name == "output_router_logits":
            small[name] = True
        elif name == "router_aux_loss_coef":
            small[name] = 0.1
        elif isinstance(value, int) and not isinstance(value, bool) and (size := _size(name)) is not None:
            small[name] = min(size, value)
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):  # some families need as many of both
        small |= {"num_key_value_heads": HEADS} if "num_key_value_heads" in small else {}
    return small


def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def make_model(family: str, folder: Path) -> None:
    """Write a tiny random model of the family, with a tokenizer."""
    torch.manual_seed(0)
    config = tiny_config(family)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family)
    config.architectures = [whole] if whole else None
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():  # biases, norms and buffers too, so that each of them counts
                tensor.add_(torch.rand_like(tensor) * 0.1)
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # a text model made of a config for more may save only a part of it
    AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model").save_pretrained(folder)
