"""A JSON of transformers' ``TrainingArguments``, and one of DeepSpeed. Both say nothing of the model and the data.

Read from transformers 5.23 (``training_args.py``) and DeepSpeed 0.18's documentation of its JSON.
"""

from pathlib import Path
from typing import Any

from kit.tools.convert import trainer
from kit.tools.convert.draft import Draft, Group, is_true

KIT = "transformers"


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file that have another name or form than here."""
    for key in [key for key in draft.given if key.startswith("_")]:
        draft.take(key)
    draft.rename({"learning_rate": "learning_rate", "num_train_epochs": "num_train_epochs", "output_dir": "output_dir"})
    draft.put("method", "full", "of adapters it says nothing: --method lora")
    trainer.take_batch(draft, 8, 1)
    trainer.take_common(draft)
    draft.values |= {name: draft.typed[name] for name in ("eval_dataset", "eval_split_size") if name in draft.typed}
    trainer.take_evaluation(draft)
    defaults = {"learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0}
    for name, value in defaults.items():
        draft.default(name, value, KIT)


def convert_deepspeed(draft: Draft, path: Path) -> None:
    """Read a DeepSpeed JSON; ``auto`` stands for what the Trainer was told, so it is nothing."""
    given = {key: value for key, value in draft.given.items() if value != "auto"}
    draft.given = {}
    draft.given["deepspeed"] = {"zero_optimization": given.pop("zero_optimization", {})}
    for theirs, ours in {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"}.items():
        if theirs in given:
            draft.given[ours] = given.pop(theirs)
    if "gradient_accumulation_steps" in given:
        draft.given["gradient_accumulation_steps"] = given.pop("gradient_accumulation_steps")
    total = given.pop("train_batch_size", None)
    if total is None and "per_device_train_batch_size" in draft.given:
        trainer.take_batch(draft, 1, 1)
    elif total is not None:
        draft.put("global_batch_size", total)
        if (micro := draft.take("per_device_train_batch_size")) is not None:
            draft.put("per_device_train_batch_size", micro)
    draft.take("gradient_accumulation_steps")
    if "gradient_clipping" in given:
        draft.put("max_grad_norm", given.pop("gradient_clipping"))
    _take_optimiser(draft, given.pop("optimizer", {}), given.pop("scheduler", {}))
    trainer.take_topology(draft)
    if is_true((given.pop("fp16", None) or {}).get("enabled")):
        draft.drop("fp16", "enabled", Group.SPEED, "bf16 needs no scaling of losses")
    for key in ("bf16", "activation_checkpointing", "amp", "data_types"):
        given.pop(key, None)
    for key, value in given.items():
        draft.drop(key, value, Group.NEEDLESS, "it steers DeepSpeed")


def _take_optimiser(draft: Draft, optimiser: dict[str, Any], scheduler: dict[str, Any]) -> None:
    params = {key: value for key, value in (optimiser.get("params") or {}).items() if value != "auto"}
    if optimiser and str(optimiser.get("type")).lower() not in ("adamw", "adam"):
        draft.drop("optimizer.type", optimiser.get("type"), Group.LEARNS, "with --drop, adamw_torch_fused")
    names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    for theirs, ours in names.items():
        if theirs in params:
            draft.put(ours, params[theirs])
    if isinstance(betas := params.get("betas"), list) and len(betas) == 2:
        draft.put("adam_beta1", betas[0])
        draft.put("adam_beta2", betas[1])
    shapes = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    params = {key: value for key, value in (scheduler.get("params") or {}).items() if value != "auto"}
    if scheduler and scheduler.get("type") in shapes:
        draft.put("lr_scheduler_type", shapes[scheduler["type"]])
        if "warmup_num_steps" in params:
            draft.put("warmup_steps", params["warmup_num_steps"])
    elif scheduler:
        draft.drop("scheduler.type", scheduler.get("type"), Group.LEARNS, "with --drop, cosine")
