"""Keys of transformers' ``TrainingArguments``, which axolotl, LLaMA-Factory, TRL and ms-swift hand on.

Their defaults are those of transformers 5.23 (``training_args.py``); each kit's module has what it sets instead.
"""

import math
import re
from pathlib import Path
from typing import Any

from kit.config.fields import choices
from kit.config.optimisers import OPTIMISERS, OTHER_NAMES, optimiser_of_other_kits
from kit.config.recipe import Recipe
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_nothing, is_true, number, shown

_FUSED = "adamw_torch_fused"
# The same optimiser with smaller or paged states, or with another way of rounding: it takes more memory here.
_BIGGER_HERE = {
    **dict.fromkeys("adamw_torch_4bit ao_adamw_4bit ao_adamw_8bit ao_adamw_fp8 optimi_adamw".split(), _FUSED),
    **dict.fromkeys(("flash_adamw", "adamw_torch_xla"), _FUSED),
    "paged_lion_32bit": "lion_32bit",
    "paged_lion_8bit": "lion_8bit",
}
_SHAPES = choices(Recipe.model_fields["lr_scheduler_type"].annotation)
_SHARING = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size")
_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml")


def take_batch(draft: Draft, micro_batch: int, accumulation: int) -> None:
    """Read the batch: what a step learns from is micro-batch x accumulation x processes.

    Args:
        micro_batch: the kit's default.
        accumulation: the kit's default.
    """
    micro_batch = int(number(draft.take("per_device_train_batch_size", micro_batch)))
    accumulation = int(number(draft.take("gradient_accumulation_steps", accumulation)))
    sharing = math.prod(int(number(draft.given.get(key) or 1)) for key in _SHARING)  # processes that share a sample
    processes = max(1, draft.num_processes // sharing)
    product = f"{micro_batch} x {accumulation} accumulated x {processes} process{'es' * (processes > 1)}"
    product += f", {sharing} of which shared a sample there" if sharing > 1 else ""
    draft.put("global_batch_size", micro_batch * accumulation * processes, product)
    draft.put("per_device_train_batch_size", micro_batch)


def fit_micro_batch(draft: Draft) -> None:
    """Make the micro-batch one that divides the global batch, where fewer processes read data there than train here."""
    total, micro = draft.values.get("global_batch_size"), draft.values.get("per_device_train_batch_size")
    if {"global_batch_size", "per_device_train_batch_size"} & set(draft.typed) or not (total and micro):
        return
    each, rest = divmod(int(number(total)), draft.num_processes)
    if rest == 0 and each % int(number(micro)):
        note = f"{shown(micro)} there; the maths is the same"
        draft.put("per_device_train_batch_size", math.gcd(each, int(number(micro))), note)


def take_schedule(draft: Draft) -> None:
    """Read the length of the run, the schedule of the rate and the optimiser."""
    steps = draft.take("max_steps")
    if steps is not None and number(steps) > 0:
        draft.put("max_steps", int(number(steps)))
    ratio, warmup = draft.take("warmup_ratio"), draft.take("warmup_steps")
    if warmup is not None and number(warmup) > 0:
        draft.put("warmup_steps", warmup)
    elif ratio is not None:
        draft.put("warmup_steps", ratio, "a share of all steps")
    elif warmup is not None:
        draft.put("warmup_steps", 0)
    _take_shape(draft)
    optim = draft.take("optim")
    if optim is None:
        return
    optim = OTHER_NAMES.get(optim, optim)
    if optim in _BIGGER_HERE:
        draft.put("optim", _BIGGER_HERE[optim])
        draft.drop(
            "optim", optim, Group.SPEED, f"{_BIGGER_HERE[optim]} learns the same, with more memory for its states"
        )
    elif optim in OPTIMISERS:
        draft.put("optim", optim)
    else:
        reason = optimiser_of_other_kits(str(optim)) or f"optim has {', '.join(OPTIMISERS)}"
        draft.drop("optim", optim, Group.LEARNS, f"{reason}; with --drop, {_FUSED}")


def _take_shape(draft: Draft) -> None:
    shape, given = draft.take("lr_scheduler_type"), draft.take("lr_scheduler_kwargs", {})
    if shape is None:
        return
    if shape not in _SHAPES:
        draft.drop("lr_scheduler_type", shape, Group.LEARNS, f"there are {', '.join(_SHAPES)}; with --drop, cosine")
        return
    draft.put("lr_scheduler_type", shape)
    given = dict(given) if isinstance(given, dict) else {"": given}
    if shape in ("cosine_with_min_lr", "warmup_stable_decay"):
        share = given.pop("min_lr_rate", given.pop("min_lr_ratio", None))
        rate = draft.values.get("learning_rate", draft.given.get("learning_rate"))
        if share is None and "min_lr" in given and rate is not None:
            share = number(given.pop("min_lr")) / number(rate)
        if share is not None:
            draft.put("min_lr_rate", share)
        if "num_decay_steps" in given:
            draft.put("lr_decay_steps", given.pop("num_decay_steps"))
    for key, value in given.items():
        if not is_nothing(value):
            draft.drop(f"lr_scheduler_kwargs.{key}", value, Group.LEARNS, "no schedule here has it")


def take_evaluation(draft: Draft, kit: str = "transformers", save: tuple[str, Any] = ("save_steps", 500)) -> None:
    """Read when to evaluate and when to save. Call it when the data are known.

    Args:
        save: our setting for when ``kit`` saves if its file does not say.
    """
    if all(is_nothing(draft.given.get(key)) for key in ("save_strategy", "save_steps", "saves_per_epoch")):
        draft.default(*save, kit)
    has_data = any(draft.values.get(name) for name in ("eval_dataset", "eval_split_size"))
    for kind in ("eval", "save"):
        strategy = draft.take_first(f"{kind}_strategy", *(["evaluation_strategy"] if kind == "eval" else []))
        steps, per_epoch = draft.take(f"{kind}_steps"), draft.take(f"{kind}s_per_epoch")
        if kind == "eval" and not has_data:
            continue
        if is_false(strategy) or (strategy is None and kind == "eval" and steps is None and per_epoch is None):
            continue  # `no` is false in YAML
        if strategy == "best":
            draft.put("keep_best", True)
        elif strategy == "epoch":
            draft.put(f"{kind}_strategy", "epoch")
        elif per_epoch is not None and number(per_epoch) > 0:
            epochs = number(draft.values.get("num_train_epochs", 1))
            _put_share(draft, kind, 1 / number(per_epoch) / epochs, f"{kind}s_per_epoch {shown(per_epoch)}")
        elif steps is not None and number(steps) >= 1:
            draft.put(f"{kind}_steps", int(number(steps)))
        elif steps is not None and number(steps) > 0:
            _put_share(draft, kind, number(steps), f"{kind}_steps {shown(steps)}, a share of all steps")
    if has_data:
        draft.rename({"early_stopping_patience": "early_stopping_patience"})
        if draft.is_on("load_best_model_at_end"):
            draft.put("keep_best", True, "the run prints how to export the best checkpoint")
        draft.rename({"per_device_eval_batch_size": "per_device_eval_batch_size"})
        draft.rename({"eval_on_start": "eval_on_start"})
    limit = draft.take("save_total_limit")
    if limit is not None:
        draft.put("save_total_limit", max(0, int(number(limit))), "0: all" if number(limit) < 1 else "")
    best = draft.take("metric_for_best_model")
    if best not in (None, "loss", "eval_loss"):
        draft.drop("metric_for_best_model", best, Group.LEARNS, "best is what has the lowest eval_loss")
    for (
        key
    ) in "early_stopping_patience load_best_model_at_end per_device_eval_batch_size eval_on_start do_eval".split():
        draft.needless(key, "there are no data to evaluate on" if not has_data else "follows eval_strategy")


def _put_share(draft: Draft, kind: str, share: float, given: str) -> None:
    """Set when to evaluate or save by a share of all steps."""
    if steps := draft.values.get("max_steps"):
        draft.put(f"{kind}_steps", max(1, math.ceil(share * steps)), given)
        return
    if abs(share * number(draft.values.get("num_train_epochs", 1)) - 1) < 1e-6:
        draft.put(f"{kind}_strategy", "epoch")
    elif share < 1:
        # Rounded down: steps are rounded up.
        draft.put(f"{kind}_steps", math.floor(share * 1e6) / 1e6, given)


def take_tracker(draft: Draft, tracker: str, project: str = "", run_name: str = "") -> None:
    """Read a tracker's own keys, for ``take_output``.

    Args:
        tracker: as ``report_to`` names it.
        project: the key of its project.
        run_name: the key of the run's name there.
    """
    draft.given["report_to"] = [*as_list(draft.given.get("report_to")), tracker]
    for ours, theirs in (("project", project), ("run_name", run_name)):
        if theirs and (value := draft.take(theirs)) is not None:
            draft.given.setdefault(ours, value)


def take_switches_off(draft: Draft) -> None:
    """Read ``--no_X``, which transformers' parser has for each switch that is on by default, as X: false."""
    for key in [key for key, value in draft.given.items() if key.startswith("no_") and value is True]:
        del draft.given[key]
        draft.given[key.removeprefix("no_")] = False


def take_output(draft: Draft) -> None:
    """Read what is logged, and where."""
    names = dict.fromkeys(as_list(draft.take("report_to")))
    trackers = [name for name in names if name not in ("none", "all")]
    if known := [name for name in trackers if name in _TRACKERS]:
        draft.put("report_to", known)
    for name in trackers:
        if name not in _TRACKERS:
            draft.drop("report_to", name, Group.NEEDLESS, "metrics.jsonl and report.html have the curves")
    logging = draft.take("logging_steps")
    if logging is not None and number(logging) >= 1:
        draft.put("logging_steps", int(number(logging)))
    for name in ("run_name", "project"):  # both are refused without a tracker
        value = draft.take(name)
        if value is not None and known:
            draft.put(name, value)


def take_precision(draft: Draft) -> None:
    """Read the precision: bf16 is that of ``--config single`` and the others."""
    for key in ("fp16", "float16", "half"):
        draft.speed(key, "bf16 needs no scaling of losses; on a T4 or V100 `kit plan` says what runs")
    given = [(key, draft.take(key)) for key in ("bf16", "bfloat16", "torch_dtype", "dtype", "tf32", "fp8")]
    for key, value in given:
        if value is None or (key in ("torch_dtype", "dtype") and str(value) in ("auto", "bfloat16", "float32")):
            continue  # computed in bf16, with float32 weights where they train
        if key == "fp8" and is_true(value):
            draft.drop(
                key, value, Group.SPEED, "computed in bf16; --fp8 true, with --torch_compile true, multiplies in 8 bits"
            )
        elif key == "bf16" and value == "full":
            draft.given["pure_bf16"] = True
            draft.names["pure_bf16"] = "bf16"
        elif str(value) in ("float16", "fp16"):
            draft.drop(key, value, Group.SPEED, "computed in bf16")
        elif key == "bf16" and is_false(value):
            draft.drop(
                key, value, Group.SPEED, "float32: put `accelerate launch --mixed_precision no` before the script"
            )
        elif key == "tf32" and is_true(value):
            draft.put("tf32", True)


def take_optimiser_that_shards(draft: Draft) -> None:
    """Replace an optimiser of bitsandbytes, which cannot read sharded weights, where the config shards them."""
    optim = draft.values.get("optim", "")
    if not draft.config.startswith("fsdp") or "optim" in draft.typed or not OPTIMISERS[optim or _FUSED].bitsandbytes:
        return
    draft.values.pop("optim")
    draft.notes.pop("optim", None)
    if optim.startswith("lion"):
        draft.drop("optim", optim, Group.LEARNS, f"bitsandbytes cannot read sharded weights; with --drop, {_FUSED}")
        return
    reason = f"bitsandbytes cannot read sharded weights; {_FUSED} has more memory for its states, which it shares out"
    draft.put("optim", _FUSED)
    draft.drop("optim", optim, Group.SPEED, reason)


def put_weights_in_bf16(draft: Draft, key: str, value: Any) -> None:
    """Take AdamW in bf16 for a model that trains whole. Adapters, and other optimisers, keep weights in float32."""
    settings = {**draft.values, **draft.typed}
    is_adamw = settings.get("optim", _FUSED).startswith("adamw_torch")
    is_as_there = not any(each.key.startswith("optim") for each in draft.left_out)
    if settings.get("method") == "full" and is_adamw and is_as_there:
        draft.put("optim", "adamw_bf16", f"{key}: {value}; here rounded at random, so that small updates are not lost")
    else:
        draft.drop(key, value, Group.SPEED, "weights that train are kept in float32: more memory, less rounding")


def take_memory(draft: Draft) -> None:
    """Read what saves memory or time."""
    checkpointing = draft.take("gradient_checkpointing")
    if is_true(checkpointing):
        draft.put("gradient_checkpointing", True)
    elif checkpointing is not None and not is_false(checkpointing):
        draft.put("gradient_checkpointing", True)
        draft.put("activation_offload", True, f"gradient_checkpointing: {checkpointing}")
    draft.needless("gradient_checkpointing_kwargs", "checkpointing is never reentrant")
    kernel = draft.take("attn_implementation")
    if kernel is not None:
        draft.drop("attn_implementation", kernel, Group.SPEED, "auto takes what the model and packing can")


def take_topology(draft: Draft) -> None:
    """Choose an Accelerate config by FSDP, DeepSpeed and the sizes of parallel groups."""
    fsdp, fsdp_config, deepspeed = draft.take("fsdp"), draft.take("fsdp_config", {}), draft.take("deepspeed")
    draft.take("fsdp_version")
    for key in [key for key in draft.given if key.startswith("fsdp_")]:
        draft.take(key)
    text = str(fsdp_config).lower().replace(" ", "").replace("fsdp_", "")
    if "activation_checkpointing':true" in text:
        draft.put("gradient_checkpointing", True, "activation_checkpointing of fsdp_config")
    if "activation_cpu_offload':true" in text:
        draft.put("gradient_checkpointing", True)
        draft.put("activation_offload", True, "activation_cpu_offload of fsdp_config")
    if fsdp is not None or fsdp_config:
        offloads = "offload" in str(fsdp) or re.search(r"(offload_params|(?<!activation_)cpu_offload)'?:'?true", text)
        draft.config = "fsdp_offload" if offloads else "fsdp"
    if deepspeed is not None:
        draft.config = _config_of_deepspeed(deepspeed)
    replicas = draft.take("dp_replicate_size")
    if replicas is not None and number(replicas) > 1:
        draft.config = "fsdp_hybrid"
    draft.take("dp_shard_size")
    for key in "tensor_parallel_size context_parallel_size sequence_parallel_degree expert_parallel_size".split():
        degree = draft.take(key)
        if degree is not None and number(degree) > 1:
            draft.config = draft.config or "fsdp"
            draft.drop(key, degree, Group.SPEED, "FSDP2 alone divides the weights: docs/parallelism.md")


def _config_of_deepspeed(given: Any) -> str:
    """The Accelerate config that does what a DeepSpeed file does, by its content, or by its name if it is not there."""
    text = str(given)
    if isinstance(given, str) and Path(given).is_file():
        text = Path(given).read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"[\s\"']", "", text.lower())
    if "offload" in text and "device:none" not in text:
        return "fsdp_offload"
    stage = re.search(r"(?:stage:|zero_?|z|ds)([0-3])(?!\d)", text)
    return "fsdp" if stage is None or stage[1] in "23" else "ddp"


def take_common(draft: Draft) -> None:
    """Read what has the same meaning in all kits that use the Trainer, but for batch, data and evaluation."""
    take_topology(draft)
    take_memory(draft)
    take_precision(draft)
    take_schedule(draft)
    if draft.is_on("pure_bf16"):
        put_weights_in_bf16(draft, "pure_bf16", True)
    take_output(draft)
