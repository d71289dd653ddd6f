"""The recipe schema: one declaration per setting gives the YAML key, the flag, the default, help and validation.

``kit.config.launch_flags`` has the settings that only the command line has. Plain Python and pydantic.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kit.config.dataset_entry import DatasetEntry
from kit.config.fields import (
    SHARE_OR_COUNT,
    STRICT,
    TEMPLATE_KWARGS,
    TOKENS,
    column_mapping,
    comma_separated,
    dataset_entries,
    module_names,
    option,
    share_or_count,
    template_kwargs,
    token_list,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
ACCELERATE_CONFIGS = ROOT / "accelerate_configs"
DEFAULT_RECIPE = "tiny"
# The settings that identify a run: if one of them changes, it is another run. All others may change between two starts
# of a run: output, logging, evaluation, micro-batch size, topology, and the number of steps.
IDENTITY = """
model_name_or_path model_revision method lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora
lora_modules_to_save trainable_tokens new_tokens freeze train_only adapter_name_or_path dataset_columns
max_train_samples dedup mixing shuffle streaming shuffle_buffer_size chat_template chat_template_kwargs train_on
max_length excess_length_strategy packing global_batch_size optim learning_rate lr_scheduler_type min_lr_rate
lr_decay_steps warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm router_aux_loss_coef seed
""".split()

_model = partial(option, "Model")
_method = partial(option, "Method")
_data = partial(option, "Data")
_optim = partial(option, "Optimisation")
_eval = partial(option, "Evaluation")
_output = partial(option, "Output and checkpoints")
_process = partial(option, "Process")


_Entries = Annotated[str | Annotated[list[DatasetEntry], Field(min_length=1)], BeforeValidator(dataset_entries)]
_Patterns = Annotated[list[str], Field(min_length=1)]
_ENTRIES = "file, glob, folder or hub id, or a list of {path: ..., weight: ...}"


class Recipe(BaseModel):
    """All settings of a run except its topology. Frozen; unknown keys are refused."""

    model_config = STRICT

    model_name_or_path: str = _model(..., "local folder or hub id of a causal language model (safetensors)")
    model_revision: str | None = _model(None, "branch, tag or commit of a hub id")
    trust_remote_code: bool = _model(False, "run Python code that comes with the model; read it first")
    new_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _model(
        None, "special tokens to add: separated by commas, or a file with one a line", expected=TOKENS
    )
    attn_implementation: Literal["auto", "sdpa", "varlen", "eager", "flash_attention_2"] = _model(
        "auto", "attention kernel; auto: varlen for packed data where the model can, else sdpa, else eager"
    )
    gradient_checkpointing: bool | Literal["auto"] = _model(
        False,
        "recompute each layer in the backward pass: less memory, more time; auto: if the plan needs it to fit",
    )

    method: Literal["full", "lora", "qlora"] = _method(
        "lora", "full: all weights; lora: adapters; qlora: adapters on a 4-bit base"
    )
    lora_r: int = _method(16, "rank of the adapters", ge=1)
    lora_alpha: float = _method(32, "scale of the adapters: alpha / r, or alpha / sqrt(r) with --use_rslora", gt=0)
    lora_dropout: float = _method(0.0, "dropout before the adapters", "probability", ge=0, lt=1)
    lora_target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(module_names)
    ] = _method("all-linear", "all-linear (all but the head), or module names separated by commas")
    lora_modules_to_save: Annotated[list[str] | None, BeforeValidator(comma_separated)] = _method(
        None, "modules that train whole beside the adapters, separated by commas: lm_head,embed_tokens"
    )
    trainable_tokens: Annotated[list[str] | None, BeforeValidator(token_list)] = _method(
        None, "tokens that exist, whose rows of embedding and head train beside the adapters", expected=TOKENS
    )
    use_rslora: bool = _method(False, "rank-stabilised scaling")
    use_dora: bool = _method(False, "weight-decomposed adapters")
    freeze: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _method(
        None, "of full: patterns of parameters that do not train, as model.embed_tokens*, separated by commas"
    )
    train_only: Annotated[_Patterns | None, BeforeValidator(comma_separated)] = _method(
        None, "of full: patterns of the only parameters that train, as model.layers.3[01].*, separated by commas"
    )
    adapter_name_or_path: str | None = _method(None, "go on training this adapter; its own shape is kept")

    dataset: _Entries = _data(..., "file, glob, folder or hub id; several with weights as a list", expected=_ENTRIES)
    dataset_config: str | None = _data(None, "config of a hub id: main for openai/gsm8k")
    dataset_split: str = _data("train", "split of a hub id or a folder with splits")
    dataset_columns: Annotated[dict[str, str], BeforeValidator(column_mapping)] = _data(
        {},
        "names of columns: question=prompt,answer=completion; images=ignore",
        expected="theirs=ours, separated by commas, each of theirs once",
    )
    mixing: Literal["samples", "tokens"] = _data("samples", "what the weights of several data sets are shares of")
    streaming: bool = _data(False, "read while training instead of tokenising first; needs max_steps")
    shuffle: bool = _data(True, "another order of the samples in each epoch; false: always that of the data")
    shuffle_buffer_size: int = _data(1000, "streamed rows that are shuffled together", "rows", ge=1)
    chat_template: str | None = _data(None, "name or file of a chat template; default: the tokenizer's own")
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(template_kwargs)] = _data(
        None, "values for variables of the chat template: enable_thinking=false", expected=TEMPLATE_KWARGS
    )
    train_on: Literal["assistant", "last", "all"] = _data(
        "assistant", "assistant: every assistant turn, or the completion; last: the last turn only; all: every token"
    )
    max_length: int = _data(2048, "longest sample, and size of a pack", "tokens", ge=8)
    excess_length_strategy: Literal["truncate", "keep_end", "drop", "error", "split"] = _data(
        "truncate",
        "of samples longer than max_length: cut off the end, or the start; leave out; stop; (text only) cut in pieces",
    )
    on_bad_row: Literal["error", "skip"] | None = _data(
        None, "rows that cannot be used: stop, or leave out and list; default: error, but skip later in a stream"
    )
    dedup: bool = _data(False, "leave out training samples with the same tokens and mask as an earlier one")
    packing: bool = _data(False, "several samples in a row of max_length tokens, none of which sees another")
    max_train_samples: int | None = _data(
        None, "train on the first so many only; of several data sets, spread over all", "samples", ge=1
    )
    dataset_num_proc: int | None = _data(None, "processes that tokenise; default: one per core", "processes", ge=1)

    global_batch_size: int = _optim(32, "samples, or packs, per optimiser step over all processes", "samples", ge=1)
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = _optim(
        1,
        "samples, or packs, per micro-batch; accumulation follows; auto: as many as are of use and fit by the plan",
        "samples",
        expected="whole number from 1, or auto",
    )
    num_train_epochs: float = _optim(1.0, "passes over the data, unless max_steps is set", "epochs", gt=0)
    max_steps: int | None = _optim(None, "optimiser steps; beats num_train_epochs", "steps", ge=1)
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = _optim(
        "adamw_torch_fused", "optimiser; the 8-bit ones need bitsandbytes"
    )
    # Each optimiser is Adam's, whose update moves a weight by about the rate: one above 1 is a slip, as 1e4 for 1e-4.
    learning_rate: float | None = _optim(None, "peak rate; default: 2e-5 for full, 2e-4 for lora and qlora", gt=0, le=1)
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = _optim("cosine", "shape after the warm-up, which each of them has; warmup_stable_decay ends with a cosine")
    min_lr_rate: float | None = _optim(
        None, "of cosine_with_min_lr and warmup_stable_decay: the last rate as a share of learning_rate", ge=0, lt=1
    )
    lr_decay_steps: Annotated[float | None, AfterValidator(share_or_count)] = _optim(
        None,
        "of warmup_stable_decay: its last part; below 1 a share of all steps",
        "steps",
        gt=0,
        expected=SHARE_OR_COUNT,
    )
    warmup_steps: Annotated[float, AfterValidator(share_or_count)] = _optim(
        0.03, "linear warm-up; below 1 a share of all steps", "steps", ge=0, expected=SHARE_OR_COUNT
    )
    weight_decay: float = _optim(0.0, "decoupled; norms and biases are spared", ge=0)
    adam_beta1: float = _optim(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: float = _optim(0.999, "decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = _optim(1e-8, "added to the denominator", gt=0)
    router_aux_loss_coef: float | None = _optim(
        None, "weight of the routers' auxiliary loss; default: the model's own where its config asks for it", ge=0
    )
    sync_each_batch: bool | None = _optim(
        None,
        "reduce gradients after each micro-batch; default: with FSDP (else 4 bytes a parameter more), not with DDP",
    )
    max_grad_norm: float = _optim(1.0, "clip the global gradient norm at this; 0 does not clip", ge=0)

    eval_dataset: _Entries | None = _eval(None, "like dataset; default: a seeded split of it", expected=_ENTRIES)
    eval_dataset_config: str | None = _eval(None, "config of eval_dataset; default: dataset_config")
    eval_dataset_split: str = _eval("test", "split of eval_dataset where it has several")
    eval_split_size: Annotated[float, AfterValidator(share_or_count)] = _eval(
        0.0, "held out of dataset; below 1 a share; 0: none", "samples", ge=0, expected=SHARE_OR_COUNT
    )
    max_eval_samples: int | None = _eval(None, "evaluate on the first so many only", "samples", ge=1)
    per_device_eval_batch_size: int | None = _eval(
        None, "samples per evaluation micro-batch; default: per_device_train_batch_size", "samples", ge=1
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = _eval(
        None, "when to evaluate before the end: every eval_steps, after each epoch, or not; default: follows eval_steps"
    )
    eval_steps: int = _eval(0, "evaluate every so many steps; 0: at the end only", "steps", ge=0)
    eval_on_start: bool = _eval(False, "evaluate before the first step too")
    early_stopping_patience: int | None = _eval(
        None, "end the run after so many evaluations in a row without a lower eval_loss", "evaluations", ge=1
    )
    early_stopping_threshold: float = _eval(
        0.0, "eval_loss must be lower than the lowest so far by more than this", ge=0
    )
    predict_with_generate: bool = _eval(False, "also answer each sample's last turn greedily; exact match of these")
    max_new_tokens: int = _eval(128, "longest generated answer", "tokens", ge=1)

    output_dir: str | None = _output(None, "folder of the run; default: runs/<recipe>-<config>")
    overwrite_output_dir: bool = _output(False, "delete what an earlier run left in output_dir")
    save_strategy: Literal["no", "steps", "epoch"] | None = _output(
        None, "when to save before the end: every save_steps, after each epoch, or not; default: follows save_steps"
    )
    save_steps: int = _output(0, "checkpoint every so many steps; 0: at the end only", "steps", ge=0)
    save_total_limit: int = _output(2, "complete checkpoints to keep; 0: all", "checkpoints", ge=0)
    keep_best: bool = _output(False, "save whenever eval_loss is the lowest so far, and keep that checkpoint too")
    save_only_model: bool = _output(
        False, "checkpoints hold weights only: a third of the size, but no run can continue from them"
    )
    async_save: bool = _output(
        True, "write checkpoints while training goes on; takes memory for one more copy of what is saved"
    )
    resume_from_checkpoint: str = _output("auto", "auto, none, or the path of a checkpoint")
    logging_steps: int = _output(1, "write metrics every so many steps", "steps", ge=1)
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(comma_separated)] = _output(
        [], "trackers, separated by commas: tensorboard, wandb, trackio"
    )
    run_name: str | None = _output(None, "name of the run in wandb and trackio; default: theirs")
    project: str = _output("kit", "project in wandb and trackio")

    max_nonfinite_steps: int = _process(
        0, "steps in a row with a loss or gradient that is not finite to skip; one more stops the run", "steps", ge=0
    )
    loss_spike_ratio: float = _process(
        0.0, "report the samples of a step whose loss is so many times the median of the last 50; 0: off", ge=0
    )
    check_replicas: int = _process(
        0, "compare weights and gradients of all processes every so many steps; 0: never", "steps", ge=0
    )
    seed: int = _process(42, "of data order, adapters and dropout", ge=0, lt=2**31)
    tf32: bool | None = _process(
        None, "round inputs of float32 products to TF32 on a GPU; default: only with mixed_precision bf16"
    )
    deterministic: bool = _process(False, "deterministic kernels on a GPU: bit-exact reruns, slower")
    ddp_timeout: int = _process(1800, "give up on a rank that is silent for so long", "seconds", ge=10)
    ddp_bucket_cap_mb: int = _process(25, "gradients that DDP reduces in one collective", "MiB", ge=1)

    @property
    def micro_batch_size(self) -> int:
        """``per_device_train_batch_size`` as a number: 1 as long as it is auto."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up; the default depends on the method."""
        return self.learning_rate or (2e-5 if self.method == "full" else 2e-4)

    @property
    def eval_batch_size(self) -> int:
        """The number of samples in a micro-batch of an evaluation."""
        return self.per_device_eval_batch_size or self.micro_batch_size

    @property
    def datasets(self) -> list[DatasetEntry]:
        """The data sets to train on, without those of weight 0."""
        entries = _as_entries(self.dataset, self.dataset_config, self.dataset_split, self.dataset_columns)
        return [entry for entry in entries if entry.weight != 0]

    @property
    def eval_datasets(self) -> list[DatasetEntry]:
        """The data sets of ``eval_dataset``; empty if it is not set."""
        config = self.eval_dataset_config or self.dataset_config
        return _as_entries(self.eval_dataset or [], config, self.eval_dataset_split, self.dataset_columns)

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data: an ``eval_dataset``, or a split of the training data."""
        return self.eval_dataset is not None or self.eval_split_size > 0


def _as_entries(
    value: str | list[DatasetEntry], config: str | None, split: str, columns: dict[str, str]
) -> list[DatasetEntry]:
    entries = [DatasetEntry(path=value)] if isinstance(value, str) else value
    return [entry.filled(config, split, columns) for entry in entries]
