"""Settings of the optimisation."""

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from kit.config.optimisers import OPTIMISERS, OptimiserName
from kit.schema.fields import FRACTION_OR_COUNT, STRICT, fraction_or_count, option
from kit.schema.rules import Rule, is_given

_option = partial(option, "Optimisation")
_identity = partial(option, "Optimisation", identity=True)


class OptimSettings(BaseModel):
    """Steps: their size and number, the optimiser, and the schedule of the learning rate."""

    model_config = STRICT

    global_batch_size: int = _identity(
        32, "global batch: samples (a pair is one), or packs, per optimiser step over all processes", "samples", ge=1
    )
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = _option(
        "auto",
        "micro-batch size; gradient-accumulation steps follow from global_batch_size; auto: the fastest that fits",
        "samples",
        expected="whole number from 1, or auto",
    )
    num_train_epochs: float = _option(1.0, "passes over the data, unless max_steps is set", "epochs", gt=0)
    max_steps: int | None = _option(None, "optimiser steps; overrides num_train_epochs", "steps", ge=1)
    optim: OptimiserName = _identity(
        "adamw_torch_fused",
        "optimiser; 8-bit, paged and lion need bitsandbytes; adamw_bf16: bf16 weights and moments; muon: for matrices",
    )
    # The update of each optimiser moves a weight by about the rate: one above 1 is a slip, as 1e4 for 1e-4.
    learning_rate: float | None = _identity(
        None,
        "peak learning rate; default: by objective and method (docs/sft-and-preferences.md)",
        gt=0,
        le=1,
    )
    loraplus_lr_ratio: float | None = _identity(
        None,
        "LoRA+: learning-rate ratio for the B matrices",
        ge=1,
        le=1000,
        needs="method lora or method qlora",
    )
    embedding_learning_rate: float | None = _identity(
        None, "peak learning rate of embedding and output head, if they train; default: learning_rate", gt=0, le=1
    )
    vision_learning_rate: float | None = _identity(
        None, "peak learning rate of the encoder, if it trains; default: learning_rate", gt=0, le=1
    )
    projector_learning_rate: float | None = _identity(
        None, "peak learning rate of the projector, if it trains; default: learning_rate", gt=0, le=1
    )
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = _identity("cosine", "learning-rate schedule after the warm-up; warmup_stable_decay (WSD) ends with a cosine")
    min_lr_rate: float | None = _identity(
        None, "for cosine_with_min_lr and warmup_stable_decay: final rate as a fraction of learning_rate", ge=0, lt=1
    )
    lr_decay_steps: Annotated[float | None, AfterValidator(fraction_or_count)] = _identity(
        None,
        "for warmup_stable_decay: steps of the final decay; below 1: fraction of all steps",
        "steps",
        gt=0,
        expected=FRACTION_OR_COUNT,
    )
    warmup_steps: Annotated[float, AfterValidator(fraction_or_count)] = _identity(
        0.03, "linear warm-up; below 1: fraction of all steps", "steps", ge=0, expected=FRACTION_OR_COUNT
    )
    weight_decay: float = _identity(0.0, "decoupled weight decay; not applied to norms and biases", ge=0)
    adam_beta1: float = _identity(0.9, "Adam beta1: decay of the first moment", ge=0, lt=1)
    adam_beta2: float = _identity(0.999, "Adam beta2: decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = _identity(1e-8, "Adam epsilon: added to the denominator", gt=0)
    router_aux_loss_coef: float | None = _identity(
        None,
        "weight of the MoE load-balancing (auxiliary) loss; default: the model config's, if it asks for this loss",
        ge=0,
    )
    sync_each_batch: bool | None = _option(
        None,
        "reduce gradients after each micro-batch; default: true with FSDP (false: 4 more bytes per trained weight)",
    )
    max_grad_norm: float = _identity(1.0, "clip the global gradient norm to this value; 0: do not clip", ge=0)

    @property
    def adam_betas(self) -> tuple[float, float]:
        """``adam_beta1`` and ``adam_beta2``."""
        return self.adam_beta1, self.adam_beta2

    @property
    def micro_batch_size(self) -> int:
        """``per_device_train_batch_size`` as a number: 1 as long as it is auto."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size


FIX_OF_BATCH = "a smaller --per_device_train_batch_size, or another --num_processes: the same maths"
_SHAPES = {"min_lr_rate": "cosine_with_min_lr warmup_stable_decay", "lr_decay_steps": "warmup_stable_decay"}

RULES = (
    Rule(
        "global_batch_size per_device_train_batch_size",
        lambda r: r.global_batch_size % r.micro_batch_size,
        "{r.global_batch_size} is not divisible by per_device_train_batch_size {r.micro_batch_size}",
        FIX_OF_BATCH,
    ),
    Rule(
        "lr_scheduler_type min_lr_rate",
        lambda r: r.lr_scheduler_type == "cosine_with_min_lr" and r.min_lr_rate is None,
        "cosine_with_min_lr without min_lr_rate",
        "--min_lr_rate 0.1: the rate then falls to a tenth of learning_rate",
    ),
    Rule(
        "lr_scheduler_type lr_decay_steps",
        lambda r: r.lr_scheduler_type == "warmup_stable_decay" and r.lr_decay_steps is None,
        "warmup_stable_decay without lr_decay_steps",
        "--lr_decay_steps 0.1: the rate then falls in the last tenth of all steps",
    ),
    *(
        Rule(
            f"{name} lr_scheduler_type",
            partial(lambda name, r: is_given(r, name) and r.lr_scheduler_type not in _SHAPES[name].split(), name),
            "given with lr_scheduler_type {r.lr_scheduler_type}",
            f"leave it out; or --lr_scheduler_type {_SHAPES[name].split()[0]}",
        )
        for name in _SHAPES
    ),
    Rule(
        "embedding_learning_rate method lora_target_modules lora_modules_to_save trainable_tokens new_tokens",
        lambda r: (
            r.embedding_learning_rate
            and r.method != "full"
            and r.lora_target_modules == "all-linear"
            and not (r.lora_modules_to_save or r.trainable_tokens or r.new_tokens or r.adapter_name_or_path)
        ),
        "given, but neither the embedding nor the output head trains",
        "leave it out; or --lora_modules_to_save lm_head,embed_tokens",
    ),
    *(
        Rule(
            f"{part}_learning_rate train_only method lora_target_modules",
            partial(
                lambda part, r: (
                    getattr(r, f"{part}_learning_rate")
                    and part not in (r.train_only or ())
                    and (r.method == "full" or r.lora_target_modules == "all-linear")
                ),
                part,
            ),
            f"given, but the {part} part does not train",
            f"leave it out; or --train_only {part},language",
        )
        for part in ("vision", "projector")
    ),
    Rule(
        "learning_rate optim",
        lambda r: not OPTIMISERS[r.optim].takes_adamw_rates and r.learning_rate is None,
        "{r.optim} without a learning_rate: the defaults are for AdamW, and its updates are larger",
        "--learning_rate with a rate 3 to 10 times below AdamW's",
    ),
    Rule(
        "optim method",
        lambda r: r.optim == "adamw_bf16" and r.method != "full",
        "adamw_bf16 with method {r.method}, whose adapters are small: bf16 would cost accuracy and save nothing",
        "--optim adamw_torch_fused; or --method full",
    ),
)
