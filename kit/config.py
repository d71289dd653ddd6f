"""The recipe schema: one declaration gives YAML keys, flags, help and validation. The only home of defaults.

Plain Python and pydantic. ``Recipe`` is what may be set for a run, ``Launch`` what the command line says
besides it, ``Topology`` and ``LoadPlan`` what follows from them. ``kit.command_line`` fills in the first two.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from kit.errors import Problem

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
ACCELERATE_CONFIGS = ROOT / "accelerate_configs"
DEFAULT_RECIPE = "tiny"

Strategy = Literal["single", "ddp", "fsdp2", "fsdp1"]
Precision = Literal["no", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What will run: decided by ``kit.strategy`` from an Accelerate config or the launcher's environment."""

    strategy: Strategy
    config_name: str  # stem of the Accelerate config file, or the strategy where the launcher decided
    num_processes: int  # over all machines
    mixed_precision: Precision
    device_type: str  # "cuda" or "cpu"
    rehearsal: bool = False  # a GPU configuration on a machine without one
    layer_classes: tuple[str, ...] = ()  # classes to shard; empty: the model's own decoder layer
    reshard_after_forward: bool = True
    offload: bool = False  # parameters, gradients and optimiser states in CPU memory
    load_on_rank0: bool = False  # one process reads the weights and sends them to the others
    backend: str | None = None  # of torch.distributed


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How this process must load weights; ``kit.model`` obeys it and knows no strategy."""

    compute_dtype: Literal["float32", "bfloat16"]  # frozen weights, and the storage type of 4-bit ones
    device: str  # where the weights go when loaded


def _comma_separated(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _column_mapping(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [tuple(part.strip() for part in pair.split("=")) for pair in value.split(",")]
    columns = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return columns if len(columns) == len(pairs) else value  # text is no mapping, and is refused as such


def _module_names(value: Any) -> Any:
    return value if value == "all-linear" else _comma_separated(value)


def _share_or_count(value: float) -> float:
    if value >= 1 and value % 1:
        raise ValueError
    return value


def _option(group: str, default: Any, meaning: str, unit: str = "", *, expected: str = "", **limits: Any) -> Any:
    extra: Any = {"group": group, "unit": unit, "expected": expected}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


_launch = partial(_option, "Launch")
_model = partial(_option, "Model")
_method = partial(_option, "Method")
_data = partial(_option, "Data")
_optim = partial(_option, "Optimisation")
_eval = partial(_option, "Evaluation")
_output = partial(_option, "Output and checkpoints")
_process = partial(_option, "Process")


_SHARE_OR_COUNT = "whole number, or share below 1,"

# Text is stripped, and never empty: `--dataset "$UNSET"` is a mistake.
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True, str_min_length=1)


class Recipe(BaseModel):
    """Everything about a run but its topology. Frozen; unknown keys are refused."""

    model_config = _STRICT

    model_name_or_path: str = _model(..., "local folder or hub id of a causal language model (safetensors)")
    model_revision: str | None = _model(None, "branch, tag or commit of a hub id")
    trust_remote_code: bool = _model(False, "run Python code that comes with the model; read it first")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = _model("sdpa", "attention kernel")
    gradient_checkpointing: bool = _model(False, "recompute each layer in the backward pass: less memory, more time")

    method: Literal["full", "lora", "qlora"] = _method(
        "lora", "full: all weights; lora: adapters; qlora: adapters on a 4-bit base"
    )
    lora_r: int = _method(16, "rank of the adapters", ge=1)
    lora_alpha: float = _method(32, "scale of the adapters: alpha / r, or alpha / sqrt(r) with --use_rslora", gt=0)
    lora_dropout: float = _method(0.0, "dropout before the adapters", "probability", ge=0, lt=1)
    lora_target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(_module_names)
    ] = _method("all-linear", "all-linear (all but the head), or module names separated by commas")
    use_rslora: bool = _method(False, "rank-stabilised scaling")
    use_dora: bool = _method(False, "weight-decomposed adapters")
    adapter_name_or_path: str | None = _method(None, "go on training this adapter; its own shape is kept")

    dataset: str = _data(..., "file (JSONL or parquet), datasets folder, or hub id")
    dataset_split: str = _data("train", "split of a hub id or a folder with splits")
    dataset_columns: Annotated[dict[str, str], BeforeValidator(_column_mapping)] = _data(
        {},
        "names of columns: question=prompt,answer=completion",
        expected="theirs=ours, separated by commas, each of theirs once",
    )
    chat_template: str | None = _data(None, "name or file of a chat template; default: the tokenizer's own")
    max_length: int = _data(2048, "longer samples are cut at the end", "tokens", ge=8)

    global_batch_size: int = _optim(32, "samples per optimiser step over all processes", "samples", ge=1)
    per_device_train_batch_size: int = _optim(1, "samples per micro-batch; accumulation follows", "samples", ge=1)
    num_train_epochs: float = _optim(1.0, "passes over the data, unless max_steps is set", "epochs", gt=0)
    max_steps: int | None = _optim(None, "optimiser steps; beats num_train_epochs", "steps", ge=1)
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = _optim(
        "adamw_torch_fused", "optimiser; the 8-bit ones need bitsandbytes"
    )
    learning_rate: float | None = _optim(None, "peak rate; default: 2e-5 for full, 2e-4 for lora and qlora", gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = _optim("cosine", "shape after the warm-up")
    warmup_steps: Annotated[float, AfterValidator(_share_or_count)] = _optim(
        0.03, "linear warm-up; below 1 a share of all steps", "steps", ge=0, expected=_SHARE_OR_COUNT
    )
    weight_decay: float = _optim(0.0, "decoupled; norms and biases are spared", ge=0)
    adam_beta1: float = _optim(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: float = _optim(0.999, "decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = _optim(1e-8, "added to the denominator", gt=0)
    max_grad_norm: float = _optim(1.0, "clip the global gradient norm at this; 0 does not clip", ge=0)

    eval_dataset: str | None = _eval(None, "like dataset; default: a seeded split of it")
    eval_dataset_split: str = _eval("test", "split of eval_dataset where it has several")
    eval_split_size: Annotated[float, AfterValidator(_share_or_count)] = _eval(
        0.0, "held out of dataset; below 1 a share; 0: none", "samples", ge=0, expected=_SHARE_OR_COUNT
    )
    max_eval_samples: int | None = _eval(None, "evaluate on the first so many only", "samples", ge=1)
    eval_steps: int = _eval(0, "evaluate every so many steps; 0: at the end only", "steps", ge=0)
    eval_on_start: bool = _eval(False, "evaluate before the first step too")
    predict_with_generate: bool = _eval(False, "also answer each evaluation prompt greedily and report exact match")
    max_new_tokens: int = _eval(128, "longest generated answer", "tokens", ge=1)

    output_dir: str | None = _output(None, "folder of the run; default: runs/<recipe>-<config>")
    overwrite_output_dir: bool = _output(False, "delete what an earlier run left in output_dir")
    save_steps: int = _output(0, "checkpoint every so many steps; 0: at the end only", "steps", ge=0)
    save_total_limit: int = _output(2, "complete checkpoints to keep; 0: all", "checkpoints", ge=0)
    resume_from_checkpoint: str = _output("auto", "auto, none, or the path of a checkpoint")
    logging_steps: int = _output(1, "write metrics every so many steps", "steps", ge=1)
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_comma_separated)] = _output(
        [], "trackers, separated by commas: tensorboard, wandb, trackio"
    )

    seed: int = _process(42, "of data order, adapters and dropout", ge=0, lt=2**31)
    deterministic: bool = _process(False, "deterministic kernels on a GPU: bit-exact reruns, slower")
    ddp_timeout: int = _process(1800, "give up on a rank that is silent for so long", "seconds", ge=10)

    @property
    def peak_learning_rate(self) -> float:
        """The rate after warm-up, with the method's default filled in."""
        return self.learning_rate or (2e-5 if self.method == "full" else 2e-4)

    @property
    def has_evaluation(self) -> bool:
        return self.eval_dataset is not None or self.eval_split_size > 0


class Launch(BaseModel):
    """What the command line says besides the recipe."""

    model_config = _STRICT

    config: str | None = _launch(
        None,
        "Accelerate config: a path, or a name in accelerate_configs/: single, ddp, fsdp, fsdp_offload, fsdp1",
    )
    recipe: str | None = _launch(None, "a path, or a name in recipes/ (`kit recipes` lists them); without it: tiny")
    num_processes: int | None = _launch(
        None, "processes over all machines; without it: one per GPU, two in a rehearsal", "processes", ge=1
    )
    dry_run: bool = _launch(False, "validate everything, count samples, tokens and steps, show the strategy, and stop")


# What users of other kits type, and what they mean here.
FOREIGN = {
    "gradient_accumulation_steps": "it is global_batch_size / (processes x per_device_train_batch_size)",
    "per_device_eval_batch_size": "evaluation uses per_device_train_batch_size",
    "bf16": "precision comes from the Accelerate config: mixed_precision: bf16",
    "fp16": "precision comes from the Accelerate config: mixed_precision: bf16",
    "tf32": "precision comes from the Accelerate config",
    "dtype": "precision comes from the Accelerate config: mixed_precision",
    "torch_dtype": "precision comes from the Accelerate config: mixed_precision",
    "mixed_precision": "it belongs in the Accelerate config (--config)",
    "load_in_4bit": "use --method qlora",
    "load_in_8bit": "8-bit bases are not offered; use --method qlora",
    "use_peft": "use --method lora",
    "use_lora": "use --method lora",
    "adapter": "use --method lora or qlora",
    "finetuning_type": "use --method full, lora or qlora",
    "fsdp": "strategy comes from the Accelerate config: --config fsdp",
    "fsdp_config": "strategy comes from the Accelerate config: --config fsdp",
    "deepspeed": "DeepSpeed is not offered; use --config fsdp",
    "config_file": "after the script it is --config; accelerate launch takes --config_file before it",
    "base_model": "use model_name_or_path",
    "model": "use model_name_or_path",
    "model_name": "use model_name_or_path",
    "datasets": "use dataset",
    "dataset_name": "use dataset",
    "dataset_path": "use dataset",
    "train_file": "use dataset",
    "validation_file": "use eval_dataset",
    "val_set_size": "use eval_split_size",
    "max_seq_length": "use max_length",
    "sequence_len": "use max_length",
    "cutoff_len": "use max_length",
    "batch_size": "use global_batch_size (a step) or per_device_train_batch_size (a micro-batch)",
    "train_batch_size": "use global_batch_size (a step) or per_device_train_batch_size (a micro-batch)",
    "micro_batch_size": "use per_device_train_batch_size",
    "num_epochs": "use num_train_epochs",
    "epochs": "use num_train_epochs",
    "lr": "use learning_rate",
    "lr_scheduler": "use lr_scheduler_type",
    "warmup_ratio": "use warmup_steps: below 1 it is a share of all steps",
    "optimizer": "use optim",
    "lora_rank": "use lora_r",
    "lora_target": "use lora_target_modules",
    "target_modules": "use lora_target_modules",
    "template": "use chat_template",
    "eval_strategy": "use eval_steps",
    "save_strategy": "use save_steps",
    "do_eval": "use eval_dataset or eval_split_size",
    "ignore_data_skip": "resuming never repeats or skips data; use resume_from_checkpoint",
    "resume": "use resume_from_checkpoint (default auto)",
    "push_to_hub": "nothing is uploaded; the run's final/ is an ordinary model folder",
    "local_rank": "ranks come from the launcher's environment",
    "num_gpus": "use num_processes",
    "nproc_per_node": "before the script it is torchrun's; after it use --num_processes",
}


@dataclass(frozen=True)
class Request:
    """The command line, read. Without ``problems`` there is a ``recipe``; with some there may be one, so that
    whoever knows the topology can add what else is wrong with it."""

    launch: Launch
    recipe: Recipe | None
    recipe_name: str
    problems: list[Problem] = field(default_factory=list)


class Contradiction(NamedTuple):
    """Settings that are right alone and wrong together; the first of ``fields`` is the place to name."""

    fields: tuple[str, ...]
    found: str
    fix: str


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """What single fields cannot tell and no machine is needed to see."""
    wrong = []
    batch, micro_batch = recipe.global_batch_size, recipe.per_device_train_batch_size
    if batch % micro_batch:
        wrong.append(
            Contradiction(
                ("global_batch_size", "per_device_train_batch_size"),
                f"{batch} is not divisible by per_device_train_batch_size {micro_batch}",
                f"try {suggest_batch(batch, micro_batch)}",
            )
        )
    if recipe.eval_dataset and recipe.eval_split_size:
        wrong.append(
            Contradiction(
                ("eval_split_size", "eval_dataset"), "given together with eval_dataset", "keep one of the two"
            )
        )
    wants = [name for name in ("eval_steps", "eval_on_start", "predict_with_generate") if getattr(recipe, name)]
    if wants and not recipe.has_evaluation:
        wrong.append(
            Contradiction(
                (wants[0], "eval_dataset", "eval_split_size"),
                "nothing to evaluate on",
                "set eval_dataset or eval_split_size",
            )
        )
    if recipe.adapter_name_or_path and recipe.method == "full":
        wrong.append(
            Contradiction(
                ("adapter_name_or_path", "method"),
                "given with method full",
                "use --method lora, or merge it first",
            )
        )
    if recipe.use_dora and recipe.method == "qlora":
        wrong.append(
            Contradiction(("use_dora", "method"), "given with method qlora", "use --method lora, or drop use_dora")
        )
    return wrong


def suggest_batch(size: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``size``: ``24 or 32``."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)


def expected(info: FieldInfo) -> str:
    """What a field takes, as help and messages say it: ``whole number from 1``."""
    extra: Any = info.json_schema_extra
    words = extra["expected"] or _type_name(info.annotation)
    for limit in info.metadata:
        match limit:
            case Ge(ge=least):
                words += f" from {least}"
            case Gt(gt=bound):
                words += f" above {bound}"
            case Lt(lt=bound):
                words += f" below {bound}"
    return words


def choices(annotation: Any) -> list[str]:
    """The words an annotation allows, if it lists them."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for member in get_args(annotation) for word in choices(member)]


def is_optional(info: FieldInfo) -> bool:
    return NoneType in get_args(info.annotation)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if members := [member for member in get_args(annotation) if member is not NoneType]:
        return " | ".join(_type_name(member) for member in members)
    return {int: "whole number", float: "number", str: "text", bool: "true | false"}[annotation]
