"""Settings of the method."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kit.config.expressions import TARGETS, module_names
from kit.config.settings.model import ModelSettings
from kit.schema.fields import (
    STRICT,
    TEMPLATE_KWARGS,
    TOKENS,
    comma_separated,
    json_or_string,
    option,
    template_kwargs,
    token_list,
)
from kit.schema.rules import Rule, is_given

_identity = partial(option, "Method", identity=True)
_of_adapters = partial(_identity, needs="method lora or method qlora")
_of_lora = partial(_identity, needs="method lora or method qlora and adapter_type lora")
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
        None,
        "weights of a row that share a scale with qat; default: 32 of 4 bits, or a row of 8 bits",
        ge=2,
        needs="qat",
    )
    adapter_type: Annotated[str, AfterValidator(str.lower)] = _of_adapters(
        "lora", "kind of the adapters: lora, or another peft_type of peft that lies around layers, such as oft"
    )
    adapter_options: Annotated[dict[str, Any] | None, BeforeValidator(_options)] = _of_adapters(
        None, "more options of peft's config class of this kind: rank_pattern, oft_block_size", expected=TEMPLATE_KWARGS
    )
    lora_r: int = _of_lora(16, "rank of the adapters", ge=1)
    lora_alpha: float = _of_lora(32, "scale of the adapters: alpha / r, or alpha / sqrt(r) with --use_rslora", gt=0)
    lora_dropout: float = _of_adapters(0.0, "dropout before the adapters", "probability", ge=0, lt=1)
    lora_target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(module_names)
    ] = _of_adapters(
        "all-linear",
        "all-linear (all but the head), module names separated by commas, or a regular expression of full names",
        expected=TARGETS,
    )
    lora_modules_to_save: Annotated[list[str] | None, BeforeValidator(module_names)] = _of_adapters(
        None, "modules that train whole beside the adapters, separated by commas: lm_head,embed_tokens"
    )
    trainable_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _identity(
        None, "tokens that exist, whose rows of embedding and head train beside the adapters", expected=TOKENS
    )
    init_lora_weights: Literal["default", "gaussian"] = _of_adapters(
        "default", "how the matrices A of adapters begin, as peft makes them; B begins as 0"
    )
    use_rslora: bool = _of_adapters(False, "rank-stabilised scaling")
    use_dora: bool = _of_adapters(False, "weight-decomposed adapters")
    freeze: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None, "with method full: patterns of parameters that do not train, separated by commas: model.embed_tokens*"
    )
    train_only: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None, "with method full: patterns of the only parameters that train, separated by commas: model.layers.3[01].*"
    )
    adapter_name_or_path: str | None = _identity(
        None, "continue training this adapter, with its own rank, scale and modules"
    )


RULES = (
    Rule(
        "adapter_name_or_path method",
        lambda r: r.adapter_name_or_path and r.method == "full",
        "given with method full",
        "--method lora, which trains the adapter on",
    ),
    *(
        Rule(
            f"{name} method",
            partial(lambda name, r: getattr(r, name) and r.method != "full", name),
            "given with method {r.method}",
            "leave it out: adapters freeze the whole model; or --method full",
        )
        for name in ("freeze", "train_only")
    ),
    *(
        Rule(
            f"{name} adapter_name_or_path",
            None,
            "given with adapter_name_or_path: what that adapter trains is kept",
            "leave it out; or leave out --adapter_name_or_path, and start from the adapter merged into its base",
        )
        for name in ("new_tokens", "trainable_tokens", "lora_modules_to_save", "adapter_options")
    ),
    Rule(
        "use_dora method",
        lambda r: r.use_dora and r.method == "qlora",
        "given with method qlora",
        "--method lora; or --use_dora false",
    ),
    Rule(
        "fp8 method",
        lambda r: r.fp8 and r.method == "qlora",
        "true, with a base of 4 bits, which is multiplied in bf16",
        "--fp8 false; or --method lora",
    ),
    Rule(
        "qat method",
        lambda r: r.qat and r.method == "qlora",
        "{r.qat}, with a base that is quantised already, to NF4, which is not what qat rounds to",
        "leave out --qat; or --method lora",
    ),
    Rule(
        "qat fp8",
        None,
        "{r.qat}, with fp8, which would round what qat has rounded to other numbers",
        "leave out --qat; or --fp8 false",
    ),
    Rule(
        "qat torch_compile",
        None,
        "{r.qat}, with torch_compile, which is not shown to round as the quantised model will",
        "--torch_compile false",
    ),
    *(
        Rule(
            f"{name} adapter_type method",
            partial(lambda name, r: r.adapter_type != "lora" and r.method != "full" and is_given(r, name), name),
            "given with adapter_type {r.adapter_type}, which does not have it or was not shown with it",
            "leave it out; or --adapter_type lora",
        )
        for name in """
        use_dora use_rslora lora_dropout lora_modules_to_save trainable_tokens new_tokens init_lora_weights
        loraplus_lr_ratio fp8 qat torch_compile""".split()
    ),
    Rule(
        "optim adapter_type method",
        lambda r: r.optim == "muon" and r.adapter_type != "lora" and r.method != "full",
        "given with adapter_type {r.adapter_type}, which was not shown with muon",
        "leave it out; or --adapter_type lora",
    ),
)
