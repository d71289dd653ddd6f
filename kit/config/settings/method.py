"""Settings of the method."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kit.config.expressions import TARGETS, module_names
from kit.config.fields import (
    STRICT,
    TEMPLATE_KWARGS,
    TOKENS,
    comma_separated,
    json_or_string,
    option,
    template_kwargs,
    token_list,
)
from kit.config.settings.model import ModelSettings

_identity = partial(option, "Method", identity=True)
_Patterns = Annotated[list[str], Field(min_length=1)]


def _options(value: Any) -> Any:
    """Parse options of peft as ``template_kwargs`` does; of a recipe file all values are strings."""
    return template_kwargs(json_or_string(value) if isinstance(value, dict) else value)


class MethodSettings(ModelSettings):
    """What of the model trains: all of it, parts, or adapters. Includes the settings of the model itself."""

    model_config = STRICT

    method: Literal["full", "lora", "qlora"] = _identity(
        "lora", "full: all weights; lora: adapters; qlora: adapters on a 4-bit base"
    )
    fp8: bool = _identity(
        False, "round what the layers multiply to 8 bits: GPUs of compute capability 8.9; it changes what is learned"
    )
    qat: (
        Literal[
            "int4_weight_only",
            "int8_weight_only",
            "int8_dynamic_activation_int4_weight",
            "int8_dynamic_activation_int8_weight",
        ]
        | None
    ) = _identity(None, "quantisation-aware training by torchao: linear layers round as this quantised model will")
    qat_group_size: int | None = _identity(
        None, "weights of a row that share a scale with qat; default: 32 of 4 bits, or a row of 8 bits", ge=2
    )
    adapter_type: Annotated[str, AfterValidator(str.lower)] = _identity(
        "lora", "kind of the adapters: lora, or another peft_type of peft that lies around layers, such as oft"
    )
    adapter_options: Annotated[dict[str, Any] | None, BeforeValidator(_options)] = _identity(
        None, "more options of peft's config class of this kind: rank_pattern, oft_block_size", expected=TEMPLATE_KWARGS
    )
    lora_r: int = _identity(16, "rank of the adapters", ge=1)
    lora_alpha: float = _identity(32, "scale of the adapters: alpha / r, or alpha / sqrt(r) with --use_rslora", gt=0)
    lora_dropout: float = _identity(0.0, "dropout before the adapters", "probability", ge=0, lt=1)
    lora_target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(module_names)
    ] = _identity(
        "all-linear",
        "all-linear (all but the head), module names separated by commas, or a regular expression of full names",
        expected=TARGETS,
    )
    lora_modules_to_save: Annotated[list[str] | None, BeforeValidator(comma_separated)] = _identity(
        None, "modules that train whole beside the adapters, separated by commas: lm_head,embed_tokens"
    )
    trainable_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _identity(
        None, "tokens that exist, whose rows of embedding and head train beside the adapters", expected=TOKENS
    )
    init_lora_weights: Literal["default", "gaussian", "orthogonal"] = _identity(
        "default", "how adapters begin: default and gaussian with B = 0, orthogonal with B A = 0"
    )
    use_rslora: bool = _identity(False, "rank-stabilised scaling")
    use_dora: bool = _identity(False, "weight-decomposed adapters")
    freeze: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None, "with method full: patterns of parameters that do not train, separated by commas: model.embed_tokens*"
    )
    train_only: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None, "with method full: patterns of the only parameters that train, separated by commas: model.layers.3[01].*"
    )
    adapter_name_or_path: str | None = _identity(
        None, "continue training this adapter, with its own rank, scale and modules"
    )
