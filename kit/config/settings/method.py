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
_ADAPTERS = "method lora or method qlora"
_NEW_ADAPTERS = f"{_ADAPTERS} and adapter_name_or_path none"
_of_adapters = partial(_identity, needs=_ADAPTERS)
_of_lora = partial(_identity, needs=f"{_NEW_ADAPTERS} and adapter_type lora")
_Patterns = Annotated[list[str], Field(min_length=1)]


def _options(value: Any) -> Any:
    """Parse options of peft as ``template_kwargs`` does; of a recipe file all values are strings."""
    return template_kwargs(json_or_string(value) if isinstance(value, dict) else value)


class MethodSettings(ModelSettings):
    """The fine-tuning method: full, parts of the model, or PEFT adapters. Includes the settings of the model."""

    model_config = STRICT

    method: Literal["full", "lora", "qlora"] = _identity(
        "lora", "full: full fine-tuning; lora: LoRA or another PEFT adapter; qlora: the same on a 4-bit (NF4) base"
    )
    fp8: bool = _identity(False, "FP8 (e4m3) matmuls in linear layers; compute capability >= 8.9; changes numerics")
    qat: (
        Literal[
            "int4_weight_only",
            "int8_weight_only",
            "int8_dynamic_activation_int4_weight",
            "int8_dynamic_activation_int8_weight",
        ]
        | None
    ) = _identity(None, "quantisation-aware training (torchao): linear layers round as this quantised model will")
    qat_group_size: int | None = _identity(
        None,
        "quantisation group size of qat: weights per scale; default: 32 for 4 bits, a whole row for 8 bits",
        ge=2,
        needs="qat",
    )
    adapter_type: Annotated[str, AfterValidator(str.lower)] = _of_adapters(
        "lora", "PEFT adapter type: lora, or another, such as oft (docs/models.md#peft-adapter-types)"
    )
    adapter_options: Annotated[dict[str, Any] | None, BeforeValidator(_options)] = _of_adapters(
        None,
        "further fields of the adapter type's config class in peft: rank_pattern, oft_block_size",
        expected=TEMPLATE_KWARGS,
    )
    lora_r: int = _of_lora(16, "LoRA rank", ge=1)
    lora_alpha: float = _of_lora(32, "LoRA scaling: alpha / r, or alpha / sqrt(r) with --use_rslora", gt=0)
    lora_dropout: float = _of_adapters(0.0, "dropout on the input of the adapters", "probability", ge=0, lt=1)
    lora_target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(module_names)
    ] = _identity(
        "all-linear",
        "modules to adapt: all-linear (all but the head), names separated by commas, or a regular expression",
        expected=TARGETS,
        needs=_NEW_ADAPTERS,
    )
    lora_modules_to_save: Annotated[list[str] | None, BeforeValidator(module_names)] = _of_adapters(
        None, "modules to fully fine-tune and save with the adapter (PEFT modules_to_save): lm_head,embed_tokens"
    )
    trainable_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _identity(
        None, "existing tokens whose embedding and lm_head rows train with the adapter", expected=TOKENS
    )
    init_lora_weights: Literal["default", "gaussian"] = _of_lora(
        "default", "initialisation of LoRA A, as in peft; B starts at 0"
    )
    use_rslora: bool = _of_lora(False, "rank-stabilised LoRA (rsLoRA) scaling")
    use_dora: bool = _of_lora(False, "DoRA: weight-decomposed LoRA")
    freeze: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None, "parameters to freeze, or not to adapt, patterns separated by commas: model.embed_tokens*"
    )
    train_only: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _identity(
        None,
        "the only parameters to train or adapt: vision, audio, projector, language, or patterns: model.layers.3[01].*",
    )
    adapter_name_or_path: str | None = _identity(
        None, "continue training this adapter, with its own rank, scaling and modules"
    )


RULES = (
    Rule(
        "adapter_name_or_path method",
        lambda r: r.adapter_name_or_path and r.method == "full",
        "given with method full",
        "--method lora, which continues training the adapter",
    ),
    *(
        Rule(
            f"{name} adapter_name_or_path",
            None,
            "given with adapter_name_or_path, which fixes what trains",
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
        "true, with a 4-bit base, whose matmuls run in bf16",
        "--fp8 false; or --method lora",
    ),
    Rule(
        "qat method",
        lambda r: r.qat and r.method == "qlora",
        "{r.qat}, with a base that is already quantised to NF4, another format",
        "leave out --qat; or --method lora",
    ),
    Rule(
        "qat fp8",
        None,
        "{r.qat}, with fp8, which would round the quantised values again",
        "leave out --qat; or --fp8 false",
    ),
    Rule(
        "torch_compile qat tiled_mlp",
        lambda r: r.torch_compile is True and (r.qat or r.tiled_mlp),
        "true, with qat or tiled_mlp: not tested together, so refused",
        "--torch_compile false",
    ),
    *(
        Rule(
            f"{name} adapter_type method",
            partial(lambda name, r: r.adapter_type != "lora" and r.method != "full" and is_given(r, name), name),
            "given with adapter_type {r.adapter_type}: not supported, or not tested together, so refused",
            "leave it out; or --adapter_type lora",
        )
        for name in """
        use_dora use_rslora lora_dropout lora_modules_to_save trainable_tokens new_tokens init_lora_weights
        loraplus_lr_ratio fp8 qat torch_compile""".split()
    ),
    Rule(
        "optim adapter_type method",
        lambda r: r.optim == "muon" and r.adapter_type != "lora" and r.method != "full",
        "given with adapter_type {r.adapter_type}: not tested with muon, so refused",
        "leave it out; or --adapter_type lora",
    ),
)
