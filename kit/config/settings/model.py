"""Settings of the model."""

from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from kit.schema.fields import STRICT, TOKENS, option, token_list
from kit.schema.rules import Rule

_option = partial(option, "Model")
_identity = partial(option, "Model", identity=True)


class ModelSettings(BaseModel):
    """The model: a causal language model, and how its forward pass runs."""

    model_config = STRICT

    model_name_or_path: str = _identity(..., "local folder or hub id of a causal language model (safetensors)")
    model_revision: str | None = _option(None, "branch, tag or commit of a hub id")
    trust_remote_code: bool = _option(False, "run Python code that comes with the model; read it first")
    new_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _identity(
        None, "special tokens to add: separated by commas, or a file with one a line", expected=TOKENS
    )
    attn_implementation: Literal["auto", "sdpa", "varlen", "eager", "flash_attention_2"] = _option(
        "auto", "attention implementation; auto: varlen for packed data if the model supports it, else sdpa, else eager"
    )
    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = _option(
        "auto",
        "experts implementation (MoE); auto: grouped_mm, else eager; batched_mm copies each token's experts",
    )
    gradient_checkpointing: bool | Literal["selective", "auto"] = _option(
        "auto",
        "activation checkpointing: recompute layers in backward; selective: only cheap parts; auto: least that fits",
    )
    activation_offload: bool = _option(
        False,
        "activation offload: keep the inputs of checkpointed layers in pinned host memory (CUDA)",
        needs="gradient_checkpointing",
    )
    tiled_mlp: bool = _option(
        False,
        "tiled MLP (ALST): MLP and norms in sequence chunks of 4,096 tokens; less memory, more operations",
    )


RULES = (
    Rule(
        "tiled_mlp gradient_checkpointing",
        lambda r: r.tiled_mlp and r.gradient_checkpointing is not True,
        "true, with gradient_checkpointing {r.gradient_checkpointing}: layers would keep what tiling saves",
        "--gradient_checkpointing true",
    ),
)
