"""Tiny models that hear sounds, with random weights and processors made of their classes. Nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

RATE = 16000
# Each sound where it stands in the content.
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}
{%- if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}
{%- if p['type'] == 'audio' %}AUDIO{% elif p['type'] == 'image' %}<|image|>{% else %}{{ p['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_WHISPER = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 16}
_MELS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}
_SHORT = {"chunk_length": 1, "hop_length": 400, "n_fft": 400}  # a window of a second, of 40 frames


def _qwen2_audio(ids: dict[str, int]) -> dict[str, Any]:
    audio = {**_WHISPER, "d_model": 16, "max_source_positions": 20}
    text = {"model_type": "qwen2", **_TEXT}
    return {"audio_config": audio, "text_config": text, "audio_token_id": ids["<|AUDIO|>"]}


def _voxtral(ids: dict[str, int]) -> dict[str, Any]:
    audio = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    audio |= {"num_mel_bins": 16}  # its code knows windows of 30 s alone
    text = {"model_type": "llama", **_TEXT, "head_dim": 8}
    return {"audio_config": audio, "text_config": text, "audio_token_id": ids["[AUDIO]"]}


def _qwen3_asr(ids: dict[str, int]) -> dict[str, Any]:
    audio = {**_WHISPER, "d_model": 16, "n_window_infer": 100, "output_dim": 32}
    audio |= {"downsample_hidden_size": 8, "num_mel_bins": 16}
    text = {"model_type": "qwen3", **_TEXT, "head_dim": 8}
    return {"audio_config": audio, "text_config": text, "audio_token_id": ids["<|audio_pad|>"]}


def _granite_speech(ids: dict[str, int]) -> dict[str, Any]:
    encoder = {"input_dim": 32, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "output_dim": 8}
    encoder |= {"context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3, "dropout": 0.0}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 16, "encoder_hidden_size": 16, "num_hidden_layers": 1}
    projector |= {"num_attention_heads": 2, "intermediate_size": 24, "cross_attention_frequency": 1}
    projector |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"model_type": "granite", **_TEXT}
    parts = {"encoder_config": encoder, "projector_config": projector, "text_config": text}
    return {**parts, "audio_token_index": ids["<|audio|>"], "has_lora_adapter": False}


def _gemma4(ids: dict[str, int]) -> dict[str, Any]:
    audio = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 16}
    audio |= {"subsampling_conv_channels": [128, 4], "use_clipped_linears": False}
    text = _TEXT | {"head_dim": 8, "sliding_window": 16, "hidden_size_per_layer_input": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": len(ids)}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4}
    names = {"image_token_id": "<|image|>", "boi_token_id": "<|boi|>", "eoi_token_id": "<|eoi|>"}
    names |= {"audio_token_id": "<|audio|>", "boa_token_id": "<|boa|>", "eoa_token_id": "<|eoa|>"}
    names |= {"video_token_id": "<|video|>"}
    parts = {"audio_config": audio, "text_config": text, "vision_config": vision}
    return {**parts, **{key: ids[token] for key, token in names.items()}}


_GEMMA_NAMES = {f"{name}_token": f"<|{name}|>" for name in ("image", "boi", "eoi", "audio", "boa", "eoa")}
# Of each family: its config, the feature extractor's settings, the processor's, names of tokens, what its template
# writes.
FAMILIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "qwen2_audio": (_qwen2_audio, _MELS | _SHORT, {}, {}, "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    "voxtral": (
        _voxtral,
        _MELS,
        {},
        {},
        "[BEGIN_AUDIO][AUDIO]",
    ),
    "qwen3_asr": (
        _qwen3_asr,
        {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 16, "hop_length": 400},
        {},
        {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
        "<|audio_start|><|audio_pad|><|audio_end|>",
    ),
    "granite_speech": (
        _granite_speech,
        {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "n_mels": 16},
        {},
        {},
        "<|audio|>",
    ),
    "gemma4": (
        _gemma4,
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        {"image_processor": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4}},
        _GEMMA_NAMES,
        "<|audio|>",
    ),
}
_ADDED = """<|AUDIO|> <|audio_bos|> <|audio_eos|> <|audio_pad|> <|audio_start|> <|audio_end|> <|audio|>
<|image|> <|boi|> <|eoi|> <|boa|> <|eoa|> <|video|> <|user|> <|assistant|>""".split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with the added tokens of all families. Voxtral's code knows [AUDIO] as number 24."""
    special = ["<|pad|>", "<|bos|>", "<|end|>", *_ADDED]
    special += [f"<|{i}|>" for i in range(len(special), 24)] + ["[AUDIO]", "[BEGIN_AUDIO]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>")


def make_audio_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` with random weights, its tokenizer and the settings of its processor."""
    config_of, of_features, of_processor, names, audio = FAMILIES[family]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("AUDIO", audio)
    if names:
        tokenizer.init_kwargs["extra_special_tokens"] = names
        tokenizer._set_model_specific_special_tokens(names)
    tokenizer.save_pretrained(folder)
    settings = config_of(tokenizer.get_vocab())
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    settings["text_config"] = settings["text_config"] | {"vocab_size": len(tokenizer), **ends}
    ties = family == "gemma4"  # as published; its code reads the embeddings beside their layer
    settings["text_config"]["tie_word_embeddings"] = ties
    config = transformers.AutoConfig.for_model(family, **settings, tie_word_embeddings=ties)
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide what is not computed
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    processor = {"processor_class": PROCESSOR_MAPPING_NAMES[family], **of_processor, "feature_extractor": of_features}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def sound(seed: int, seconds: float) -> np.ndarray:
    """Noise with a tone."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tone = 0.3 * np.sin(2 * np.pi * rng.uniform(200, 2000) * times)
    return (tone + rng.normal(size=len(times)) * 0.05).astype(np.float32)


def write_rows(folder: Path, seconds: list[list[float]], name: str = "train.jsonl") -> Path:
    """Write rows of conversations, each with sounds of these lengths; none for an empty list."""
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    for i, of_row in enumerate(seconds):
        parts: list[dict[str, str]] = []
        for k, length in enumerate(of_row):
            soundfile.write(folder / f"{i}-{k}.wav", sound(100 * i + k, length), RATE, subtype="FLOAT")
            parts.append({"type": "audio", "path": f"{i}-{k}.wav"})
            parts.append({"type": "text", "text": f"sound {k} "})
        question = [*parts, {"type": "text", "text": f"what is number {i}?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"tea and {i} " * (1 + i % 3)},
        ]
        rows.append({"messages": messages})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name
