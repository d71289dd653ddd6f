"""Which class of transformers opens the model of a config.

Promises: a checkpoint that reads images or audio too is opened whole, by the class that its config names, so that
``final/`` holds it whole. Only families are opened so whose text is known to be trained as their own code would.
"""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from kit.model.pretrained.heads import class_of_head

# Families of models of text and images that ``benchmarks/families.py`` has found right on text. Others need an image in
# each row (BLIP, Idefics, Kosmos 2), have an encoder for text (Florence 2), or let tokens attend to later ones.
VISION_LANGUAGE_FAMILIES = frozenset(
    """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid emu3 ernie4_5_vl_moe
    glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite_docling hyperclovax_vision_v2 idefics2 idefics3 inkling2
    internvl kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr
    minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral4 mllama muse_glimmer ovis2 paddleocr_vl pp_chart2table
    qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm video_llama_3
    video_llava vipllava
    """.split()
)
# Families of models of text and audio.
AUDIO_FAMILIES = frozenset("glmasr granite_speech granite_speech_plus qwen2_audio qwen3_asr voxtral".split())


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that opens and builds the model of ``config``.

    For some configs transformers knows both a class for text and images, and one for the text alone (Llama 4, Qwen
    3.5). ``architectures`` says which of them wrote the weights, and whether it has another head.
    """
    if of_head := class_of_head(config):
        return of_head
    whole = _whole_class(config)
    if whole is None or config.model_type not in VISION_LANGUAGE_FAMILIES | AUDIO_FAMILIES:
        return AutoModelForCausalLM
    if whole.__name__ not in (config.architectures or ()) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForMultimodalLM


def model_class(config: Any) -> Any:
    """Return the class of the model of ``config``; None if its code is not in transformers."""
    return auto_class(config)._model_mapping.get(type(config), None)


def why_no_text(config: Any) -> str:
    """Return why a multimodal model cannot be trained on text; empty if it can, or if it is text-only."""
    brings_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    whole = _whole_class(config)
    if whole is None or brings_class or model_class(config) is not None:
        return ""
    kind = "vision-language" if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else "multimodal"
    return f"a {whole.__name__}, a {kind} model that was not tested on text"


def _whole_class(config: Any) -> Any:
    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
