"""torchtune's YAML, read from version 0.7.0, commit bd2a0fc of 2026-04-23: ``recipes/*.py``, ``datasets``, ``data`` and
the tokenizers of ``models``.

Its defaults: no clipping, a random seed, a constant rate without ``lr_scheduler``, torch's weight decay of 0.01 for all
parameters, the whole of a sample learned by the Alpaca builders, and samples of any length.
"""

import re
from pathlib import Path
from typing import Any

from kit.config import other_kits
from kit.config.optimisers import IN_BACKWARD, OPTIMISERS
from kit.tools.convert import trainer
from kit.tools.convert.draft import Draft, Group, is_false, is_nothing, is_true, number
from kit.tools.convert.torchtune_data import take_data

KIT = "torchtune"
NEEDLESS = {
    "the model's folder has it": """
        tokenizer.path tokenizer.merges_file tokenizer.vocab_path tokenizer.merges_path tokenizer.max_num_tiles
        checkpointer._component_ checkpointer.checkpoint_files checkpointer.checkpoint_files.filename_format
        checkpointer.checkpoint_files.max_filename checkpointer.model_type checkpointer.safe_serialization""",
    "a run continues where it was interrupted, in an output_dir of its own": """
        checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint checkpointer.output_dir""",
    "it is one loss, computed in chunks": "loss.num_output_chunks",
    "metrics.jsonl and report.html have the curves": "log_peak_memory_stats",
}
SPEED = {
    "FSDP2 alone divides the weights": """
        tensor_parallel_plan tensor_parallel_dim context_parallel_dim data_parallel_shard_dim
        data_parallel_replicate_dim""",
    other_kits.FP8: "enable_fp8_training",
}
_TRACKERS = {
    "WandBLogger": "wandb",
    "TensorBoardLogger": "tensorboard",
    "CometLogger": "comet_ml",
    "MLFlowLogger": "mlflow",
}
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss", "SFTLoss")
_LINEAR = {"output_proj": "o_proj"}  # torchtune's name of the last linear layer of attention
_FUSED = ("phi3", "phi4")  # families whose models here have q, k and v in one layer


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file."""
    draft.given = _flat(draft.given)
    _resolve(draft.given)
    if "optimizer._component_" not in draft.given or "dataset._component_" not in draft.given:
        draft.refuse("optimizer", None, "absent, so it trains nothing: kit score scores, kit export converts")
        draft.given.clear()
        return
    _take_model(draft)
    _take_optimiser(draft)
    _take_schedule(draft)
    _take_loss(draft)
    take_data(draft)
    if not draft.is_on("profiler.enabled"):
        draft.take("profiler._component_")
    _take_tracker(draft)
    for start in ("profiler", "ref_checkpointer", "tensor_parallel_plan"):
        _keep_component(draft, start)
    for table, leave_out in ((NEEDLESS, draft.needless), (SPEED, draft.speed)):
        for reason, words in table.items():
            for key in words.split():
                leave_out(key, reason)
    _take_rest(draft)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, without what is null."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "column_map":
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _keep_component(draft: Draft, start: str) -> None:
    """Replace the keys of one component by its name."""
    component = draft.take(f"{start}._component_")
    for key in [key for key in draft.given if key.startswith(f"{start}.")]:
        draft.take(key)
    if component is not None:
        draft.given[start] = str(component).rpartition(".")[2]


def _take_tracker(draft: Draft) -> None:
    name = str(draft.given.get("metric_logger._component_", "")).rpartition(".")[2]
    if name in _TRACKERS:
        draft.put("report_to", [_TRACKERS[name]])
        draft.rename({"metric_logger.project": "project", "metric_logger.experiment_name": "project"})
        draft.rename({"metric_logger.name": "run_name", "metric_logger.run_name": "run_name"})
    elif name:
        draft.drop("metric_logger", name, Group.NEEDLESS, "metrics.jsonl and report.html have the curves")
    for key in [key for key in draft.given if key.startswith("metric_logger.")]:
        draft.take(key)


def _resolve(values: dict[str, Any]) -> None:
    """Fill in ``${name}``, as OmegaConf does."""
    for key, value in values.items():
        if isinstance(value, str):
            values[key] = re.sub(r"\$\{([\w.]+)\}", lambda found: str(values.get(found[1], found[0])), value)


_QAT = {
    "Int8DynActInt4WeightQATQuantizer": "int8_dynamic_activation_int4_weight",
    "Int4WeightOnlyQATQuantizer": "int4_weight_only",
}


def _take_model(draft: Draft) -> None:
    component = str(draft.take("model._component_", ""))
    family, _, builder = component.removeprefix("torchtune.models.").rpartition(".")
    if not component.startswith("torchtune.models.") or "vision" in component or "clip" in family:
        reason = "no builder of torchtune's text models" if "vision" not in component else "this kit reads only text"
        draft.refuse("model._component_", component, reason)
    method = "qlora" if builder.startswith("qlora") or draft.is_on("model.quantize_base") else "full"
    if builder.startswith("lora") and method == "full":
        method = "lora"
    draft.put("method", method)
    draft.put("model_name_or_path", draft.take("checkpointer.checkpoint_dir", ""), "or its hub id")
    if str(draft.given.get("checkpointer._component_", "")).endswith("FullModelMetaCheckpointer"):
        reason = "weights in Meta's format; --model_name_or_path with the hub id, or a folder with safetensors"
        draft.refuse("checkpointer._component_", "FullModelMetaCheckpointer", reason, "model_name_or_path")
    draft.rename({"output_dir": "output_dir"})
    if method == "full":
        return
    draft.rename({"model.lora_rank": "lora_r", "model.lora_alpha": "lora_alpha", "model.use_dora": "use_dora"})
    draft.default("lora_r", 8, KIT)
    draft.default("lora_alpha", 16, KIT)
    draft.put("lora_dropout", draft.take("model.lora_dropout", 0.0))
    names = [_LINEAR.get(name, name) for name in draft.take("model.lora_attn_modules", [])]
    if draft.is_on("model.apply_lora_to_mlp"):
        names += ["gate_proj", "up_proj", "down_proj"]
    if draft.is_on("model.apply_lora_to_output"):
        names.append("lm_head")
    if family.split(".")[0] in _FUSED:
        reason = "the model here has q, k and v in one layer; with --drop, all-linear"
        draft.drop("model.lora_attn_modules", names, Group.LEARNS, reason)
    else:
        draft.put("lora_target_modules", names)


def _take_optimiser(draft: Draft) -> None:
    component = str(draft.take("optimizer._component_"))
    name = component.rpartition(".")[2]
    known = {each.bitsandbytes: name for name, each in OPTIMISERS.items() if each.bitsandbytes}
    known |= {"AdamW": "adamw_torch_fused", "PagedAdamW": "paged_adamw_32bit", "Lion": "lion_32bit"}
    if name in ("AdamW4bit", "CPUOffloadOptimizer", "AdamWFp8"):
        draft.drop("optimizer._component_", component, Group.SPEED, "the same AdamW, with more memory for its states")
        draft.put("optim", known["AdamW"])
    elif name in known:
        draft.put("optim", known[name])
    else:
        draft.drop("optimizer._component_", component, Group.LEARNS, "with --drop, adamw_torch_fused")
    draft.take("optimizer.fused")
    draft.rename({"optimizer.lr": "learning_rate", "optimizer.eps": "adam_epsilon"})
    draft.put("weight_decay", draft.take("optimizer.weight_decay", 0.01), "there also of norms and biases")
    if betas := draft.take("optimizer.betas"):
        draft.put("adam_beta1", betas[0])
        draft.put("adam_beta2", betas[1])


def _take_schedule(draft: Draft) -> None:
    scheduler = str(draft.take("lr_scheduler._component_", "")).rpartition(".")[2]
    warmup = draft.take("lr_scheduler.num_warmup_steps", 0)
    if scheduler and scheduler != "get_cosine_schedule_with_warmup":
        draft.drop("lr_scheduler._component_", scheduler, Group.LEARNS, "with --drop, cosine")
    draft.put("lr_scheduler_type", "cosine" if scheduler else "constant", "" if scheduler else f"the default of {KIT}")
    draft.put("warmup_steps", warmup)
    cycles = draft.take("lr_scheduler.num_cycles", 0.5)
    if number(cycles) != 0.5:
        draft.drop("lr_scheduler.num_cycles", cycles, Group.LEARNS, "no schedule here has it")
    epochs, steps = draft.take("epochs", 1), draft.take("max_steps_per_epoch")
    draft.put("num_train_epochs", epochs)
    if steps is not None:
        draft.put("max_steps", int(number(steps)) * int(number(epochs)), "max_steps_per_epoch x epochs")
    micro, accumulation = (
        int(number(draft.take("batch_size"))),
        int(number(draft.take("gradient_accumulation_steps", 1))),
    )
    processes = draft.num_processes
    product = f"{micro} x {accumulation} accumulated x {processes} process{'es' * (processes > 1)}"
    draft.put("global_batch_size", micro * accumulation * processes, product)
    draft.put("per_device_train_batch_size", micro)
    clip = draft.take("clip_grad_norm")
    draft.put("max_grad_norm", 0 if is_nothing(clip) or str(clip) == "inf" else clip, "0: not clipped")
    if draft.values["max_grad_norm"]:
        draft.notes.pop("max_grad_norm")


def _take_loss(draft: Draft) -> None:
    loss = str(draft.take("loss._component_", "")).rpartition(".")[2]
    beta, smoothing = draft.take("loss.beta", 0.1), draft.take("loss.label_smoothing", 0)
    if loss == "DPOLoss":
        draft.put("objective", "dpo")
        draft.put("beta", beta)
        if number(smoothing):
            draft.put("label_smoothing", smoothing)
    elif loss not in _LOSSES:
        draft.refuse("loss._component_", loss, other_kits.REWARDS)


def _take_update_in_backward(draft: Draft) -> None:
    """Leave out the update of each weight in the backward pass, and name smaller optimisers that this file can have."""
    if not draft.is_on("optimizer_in_bwd"):
        return
    settings = {**draft.values, **draft.typed}
    known = OPTIMISERS[settings["optim"]]
    smaller = []
    if not known.in_8_bits and not draft.config and settings["optim"] != "adamw_bf16":
        smaller.append("--optim adamw_8bit")
    if settings["method"] == "full" and not known.in_8_bits and settings["optim"] != "adamw_bf16":
        smaller.append("--optim adamw_bf16")
    reason = f"{IN_BACKWARD}; the same maths with more memory" + (f", or {' or '.join(smaller)}" if smaller else "")
    draft.drop("optimizer_in_bwd", True, Group.SPEED, reason)


def _take_rest(draft: Draft) -> None:
    """Switches of memory and speed, and what is about saving."""
    if draft.is_on("compile"):
        draft.put("torch_compile", True)
    if draft.is_on("enable_activation_checkpointing"):
        draft.put("gradient_checkpointing", True)
    selective = draft.take("ac_mode")
    if selective == "selective":
        draft.put("gradient_checkpointing", "selective")
    draft.take("ac_option")
    offload = [draft.is_on(key) for key in ("fsdp_cpu_offload", "fsdp.cpu_offload")]
    draft.config = "fsdp_offload" if any(offload) else "fsdp" if draft.num_processes > 1 else ""
    if draft.take("dtype", "bf16") != "bf16":
        draft.drop(
            "dtype", "fp32", Group.SPEED, "float32: put `accelerate launch --mixed_precision no` before the script"
        )
    else:
        trainer.put_weights_in_bf16(draft, "dtype", "bf16")
    _take_update_in_backward(draft)
    draft.take("device")
    draft.rename({"log_every_n_steps": "logging_steps"})
    draft.take("save_adapter_weights_only")
    if is_true(draft.take("save_last_epoch_only")) is False:
        draft.default("save_strategy", "epoch", KIT)
    draft.take("save_every_n_epochs")
    draft.rename({"checkpointer.keep_last_n_checkpoints": "save_total_limit"})
    quantizer = draft.take("quantizer._component_")
    if scheme := _QAT.get(str(quantizer).rpartition(".")[2]):
        draft.put("qat", scheme, "but for the output head, which torchtune rounds too")
        draft.put("qat_group_size", draft.take("quantizer.groupsize", 256))
        if draft.values.pop("torch_compile", False):
            draft.drop("compile", True, Group.SPEED, "with qat no layer is compiled")
        if steps := draft.take("fake_quant_after_n_steps"):
            draft.drop("fake_quant_after_n_steps", steps, Group.LEARNS, "all steps round, from the first one")
    elif quantizer is not None:
        draft.drop("quantizer", quantizer, Group.LEARNS, "the weights train as they are; with --drop, without rounding")
    draft.take("quantizer.groupsize")
    for start in ("teacher_model.", "kd_loss.", "early_exit_loss.", "layer_dropout.", "reward_and_value_model."):
        for key in [key for key in draft.given if key.startswith(start)]:
            value = draft.given.pop(key)
            if key.endswith("._component_") or start == "layer_dropout.":
                draft.drop(key, value, Group.LEARNS, "not offered")
    for key in [key for key in draft.given if key.startswith("teacher_checkpointer.")]:
        draft.given.pop(key)
    for key in list(draft.given):
        if is_false(draft.given[key]):
            draft.given.pop(key)
