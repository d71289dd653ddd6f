"""Which class of transformers opens the model of a config.

Promises: a checkpoint that reads images or audio too is opened whole, by the class that its config names, so that
``final/`` holds it whole. ``kit.train.checks`` proves before the first step that it is one to train on text.
"""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from kit.model.pretrained.heads import class_of_head


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that opens and builds the model of ``config``.

    For some configs transformers knows both a class for text and images, and one for the text alone (Llama 4, Qwen
    3.5). ``architectures`` says which of them wrote the weights, and whether it has another head.
    """
    if of_head := class_of_head(config):
        return of_head
    whole = whole_class(config)
    if whole is None:
        return AutoModelForCausalLM
    if whole.__name__ not in (config.architectures or ()) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForMultimodalLM


def model_class(config: Any) -> Any:
    """Return the class of the model of ``config``; None if its code is not in transformers."""
    return auto_class(config)._model_mapping.get(type(config), None)


def whole_class(config: Any) -> Any:
    """Return the class of the model of text, images and audio of ``config``; None if there is none."""
    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
