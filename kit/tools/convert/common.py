"""Keys of transformers' Trainer that several kits share, and that need more than another name here.

Defaults are those of transformers 5.23 (``training_args.py``), unless a kit has others.
"""

import math
import re
from typing import Any

from kit.config.dataset_entry import DatasetEntry, with_own_names
from kit.config.optimisers import OTHER_NAMES
from kit.system.errors import counted
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_nothing, number, shown

# Sizes of groups of processes that share a sample: those that share its tokens, and those that share the model.
_SEQUENCE = ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size")
_MODEL = ("tensor_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
FAR = 8192  # tokens, where the other kit takes what the model can
_TRACKERS = ("tensorboard", "wandb", "trackio")


def take_batch(draft: Draft, micro_batch: int, accumulation: int = 1) -> None:
    """Read the global batch: micro-batch x gradient accumulation x data-parallel processes.

    Args:
        micro_batch: the kit's default.
        accumulation: the kit's default.
    """
    micro = int(number(draft.take("per_device_train_batch_size", draft.take("micro_batch_size", micro_batch))))
    steps = int(number(draft.take("gradient_accumulation_steps", accumulation)))
    sequence = draft.sequence_parallel = math.prod(int(number(draft.take(key, 1))) for key in _SEQUENCE)
    sharing = sequence * math.prod(int(number(draft.given.get(key) or 1)) for key in _MODEL)
    if sharing > sequence or number(draft.given.get("expert_model_parallel_size") or 1) > 1:
        draft.config = "fsdp"
    draft.num_processes = max(draft.num_processes, sharing)
    readers = draft.num_processes // sharing
    given = draft.take("global_batch_size")
    size = int(number(given or micro * steps * readers))
    note = "" if given else f"{micro} x {steps} (gradient accumulation) x {counted(readers, 'process')}"
    draft.put("global_batch_size", size, note)
    groups = math.gcd(size, draft.num_processes // sequence)
    draft.num_processes = groups * sequence
    draft.put("per_device_train_batch_size", math.gcd(micro, size // groups))


def take_training(draft: Draft) -> None:
    """Read the optimiser, the schedule, the Accelerate config and the trackers."""
    optim = draft.take("optim")
    if optim is not None:
        draft.put("optim", OTHER_NAMES.get(optim, optim))
    _take_schedule(draft)
    _take_config(draft)
    names = [name for name in as_list(draft.take("report_to")) if name not in ("none", "all")]
    draft.put("report_to", [name for name in names if name in _TRACKERS])
    for name in [name for name in names if name not in _TRACKERS]:
        draft.leave("report_to", name, "metrics.jsonl and report.html have the curves", Group.NEEDLESS)


def _take_schedule(draft: Draft) -> None:
    steps, share = draft.take("warmup_steps"), draft.take("warmup_ratio")
    if share is not None and not number(steps or 0):
        draft.put("warmup_steps", share, "a fraction of all steps")
    elif steps is not None:
        draft.put("warmup_steps", steps)
    options = draft.take("lr_scheduler_kwargs", {})
    floor = options.pop("min_lr_rate", None) if isinstance(options, dict) else None
    if floor is not None:
        draft.put("min_lr_rate", floor)
    if options:
        draft.given["lr_scheduler_kwargs"] = options


def take_answers(draft: Draft) -> None:
    """Read the sampling settings of on-policy distillation."""
    draft.given.setdefault("max_new_tokens", draft.take("max_completion_length"))
    for name in ("max_new_tokens", "temperature", "top_p"):
        if (value := draft.take(name)) is not None:
            draft.put(name, value)


def _take_config(draft: Draft) -> None:
    """Choose an Accelerate config by FSDP and DeepSpeed."""
    fsdp = [draft.take(key) for key in ("fsdp", "fsdp_config")]
    text = re.sub(r"[\s'\"]|fsdp_", "", str(fsdp).lower())
    deepspeed = draft.take("deepspeed")
    if deepspeed is not None:
        text = re.sub(r"[\s'\"]", "", str(deepspeed).lower())  # of a file its name says the stage
        stage = re.search(r"(?:stage:|zero_?|ds_?z)([0-3])", text)
        draft.config = "ddp" if stage and stage[1] in "01" else "fsdp"
    elif any(not is_nothing(each) for each in fsdp):
        draft.config = "fsdp"
    if re.search(r"(?<!activation_cpu_)offload(\w*:(true|\{[^}]*device:(cpu|nvme))|\w*(?![\w:]))", text):
        reason = "--config fsdp_offload keeps parameters in CPU memory"
        draft.leave("offloading of fsdp or deepspeed", True, reason, Group.SPEED)
    if "activation_checkpointing:true" in text:
        draft.put("gradient_checkpointing", True, "activation_checkpointing of fsdp_config")


def take_template(draft: Draft, key: str) -> None:
    """Set our template of the same text; any other is left out."""
    same = {} if draft.has_images else draft.table.get("templates", {})  # ours know no images
    name = draft.take(key)
    if name is None or "chat_template" in draft.typed:
        return
    if name in same:
        draft.put("chat_template", same[name])
    else:
        reason = "no equivalent template here; --drop uses the model's own, or give --chat_template FILE"
        draft.leave(key, name, reason)


def take_evaluation(draft: Draft) -> None:
    """Read when to evaluate and when to save. Call it when the data are known."""
    draft.read("val_set_size", "val_size", "split_dataset_ratio")
    draft.given.setdefault("eval_strategy", draft.take("evaluation_strategy"))
    has_data = any({**draft.values, **draft.typed}.get(name) for name in ("eval_dataset", "eval_split_size"))
    for kind in ("eval", "save"):
        strategy, steps, per_epoch = map(draft.take, (f"{kind}_strategy", f"{kind}_steps", f"{kind}s_per_epoch"))
        if kind == "eval" and not has_data:
            continue
        if is_false(strategy):
            draft.put(f"{kind}_strategy", "no")
        elif strategy in ("epoch", "best"):
            draft.put(*(("keep_best", True) if strategy == "best" else (f"{kind}_strategy", "epoch")))
        elif per_epoch is not None and number(per_epoch) > 0:
            _put_share(draft, kind, number(per_epoch))
        elif steps is not None and number(steps) > 0:
            draft.put(f"{kind}_steps", steps, "" if number(steps) >= 1 else "a fraction of all steps")
        elif kind == "save":
            for name, value in draft.table["saving"].items():
                draft.default(name, value)
    if not has_data:
        beginnings = ("eval_", "early_stopping", "per_device_eval", "load_best", "metric_for_best")
        for key in [key for key in draft.given if key.startswith(beginnings)]:
            draft.leave(key, draft.take(key), "there is no evaluation data", Group.NEEDLESS)
    if (limit := draft.take("save_total_limit")) is not None:
        draft.put("save_total_limit", max(0, int(number(limit))))
    if draft.given.get("metric_for_best_model") == "loss":
        draft.take("metric_for_best_model")


def _put_share(draft: Draft, kind: str, per_epoch: float) -> None:
    """Set when to evaluate or save from a number per epoch, by a fraction of all steps."""
    epochs = number(draft.values.get("num_train_epochs", draft.given.get("num_epochs", 1)))
    note = f"{kind}s_per_epoch {shown(per_epoch)}"
    if per_epoch == 1:
        draft.put(f"{kind}_strategy", "epoch")
    elif per_epoch * epochs > 1:
        draft.put(f"{kind}_steps", math.floor(1e6 / per_epoch / epochs) / 1e6, note)  # steps are rounded up


# --- data


def entry(path: Any, columns: dict[str, str] | None = None, split: Any = None, **more: Any) -> DatasetEntry:
    """One dataset. ``columns`` maps a column to the kit's field; one that has the field's name is left out."""
    columns = {theirs: ours for theirs, ours in (columns or {}).items() if theirs != ours}
    return DatasetEntry(path=str(path), columns=columns or None, split=None if split == "train" else split, **more)


def put_data(draft: Draft, name: str, entries: list[DatasetEntry]) -> None:
    """Set ``dataset`` or ``eval_dataset``: by single settings if it is one, else as a list."""
    if not entries:
        return
    first = entries[0]
    if name == "eval_dataset" and len(entries) == 1 and first.split is None:
        first = first.model_copy(update={"split": "train"})  # the default of eval_dataset_split is test
    needs_list = first.prompt_format is not None or first.max_samples is not None
    needs_list |= name == "eval_dataset" and bool(first.columns or first.config or first.revision)
    if len(entries) > 1 or needs_list:
        draft.put(name, [each.as_written() for each in with_own_names([first, *entries[1:]])])
        return
    draft.put(name, first.path)
    for key in ("config", "split", "revision"):
        if value := getattr(first, key):
            draft.put(f"{name}_{key}", value)
    if first.columns:
        draft.put("dataset_columns", first.columns)
