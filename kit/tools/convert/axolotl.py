"""axolotl's YAML, read from version 0.18.0, commit 067b021 of 2026-07-24: ``utils/schemas``, ``core/builders/base.py``,
``utils/data`` and ``prompt_strategies``."""

import re
from pathlib import Path

from kit.config import other_kits
from kit.tools.convert import trainer
from kit.tools.convert.axolotl_data import take_data
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_nothing, is_true, number, shown
from kit.tools.convert.modules import put_adapter_type, put_initialisation, put_patterns, put_targets

KIT = "axolotl"
RENAMES = {
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "lora_model_dir": "adapter_name_or_path",
    "learning_rate": "learning_rate",
    "num_epochs": "num_train_epochs",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "dataset_exact_deduplication": "dedup",
    "tokens": "new_tokens",
    "output_dir": "output_dir",
}
# Names of transformers' Trainer for what axolotl calls otherwise.
_OF_TRAINER = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
}
# Each tracker's switch begins with use_; the keys of its project and of the run's name there, by its name here.
_TRACKERS = {
    "wandb": ("wandb", "wandb_project", "wandb_name"),
    "mlflow": ("mlflow", "mlflow_experiment_name", "mlflow_run_name"),
    "swanlab": ("swanlab", "swanlab_project", "swanlab_experiment_name"),
    "comet": ("comet_ml", "comet_project_name", ""),
    "trackio": ("trackio", "trackio_project_name", "trackio_run_name"),
    "tensorboard": ("tensorboard", "", ""),
}
_PLUGINS_OF_SPEED = "cut_cross_entropy liger kernels expert_parallel"
_OTHER_TRAINING = "grpo gdpo ebft bt reinforce rloo ppo nash online_dpo xpo gspo"


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file that have another name or form than here."""
    _refuse_other_training(draft)
    _take_method(draft)
    for theirs, ours in _OF_TRAINER.items():
        if (value := draft.take(theirs)) is not None:
            draft.given[ours] = value
            draft.names[ours] = theirs
    if (total := draft.take("batch_size")) is not None and "gradient_accumulation_steps" not in draft.given:
        micro = number(draft.given.get("per_device_train_batch_size", 1))
        draft.given["gradient_accumulation_steps"] = max(1, int(number(total) // micro))
    trainer.take_batch(draft, 1, 1)
    _take_trackers(draft)
    draft.rename(RENAMES)
    draft.put("packing", is_true(draft.values.get("packing", False)))
    if not draft.values.get("dedup", True):
        del draft.values["dedup"]
    _take_schedule(draft)
    trainer.take_common(draft)
    take_data(draft)
    trainer.take_evaluation(draft, KIT, ("save_strategy", "epoch"))
    _take_special_tokens(draft)
    _take_plugins(draft)
    if is_true(draft.take("shuffle_merged_datasets", True)) is False:
        draft.put("shuffle", False, "shuffle_merged_datasets: false; axolotl still draws the batches at random")
    draft.default("save_total_limit", 4, KIT)
    draft.default("weight_decay", 0.0, KIT)
    draft.default("lr_scheduler_type", "cosine", KIT)
    if "warmup_steps" not in draft.values:
        draft.put("warmup_steps", 0.03, "the default of axolotl, which warms up for 100 steps at most")


def _take_trackers(draft: Draft) -> None:
    """Read the switches and names of trackers. Those of wandb and swanlab are on where a project is named."""
    for name, (tracker, project, run_name) in _TRACKERS.items():
        switch = draft.take(f"use_{name}")
        if is_true(switch) or (
            switch is None and name in ("wandb", "swanlab") and not is_nothing(draft.given.get(project))
        ):
            trainer.take_tracker(draft, tracker, project, run_name)
        else:
            draft.take_first(project, run_name)


def _refuse_other_training(draft: Draft) -> None:
    """Refuse what trains on rewards, images or classes."""
    kind = draft.take("rl")
    if kind in _OTHER_TRAINING.split():
        draft.refuse("rl", kind, other_kits.REWARDS)
    elif kind == "ipo":
        draft.put("objective", "dpo")
        draft.put("dpo_loss", "ipo")
    elif kind is not None:
        draft.put("objective", kind)
        if kind == "orpo":
            draft.rename({"orpo_alpha": "beta"})
    if draft.is_on("use_eaft"):
        draft.put("objective", "eaft")
        if (num_tokens := draft.take("eaft_k", 20)) != 20:
            draft.drop("eaft_k", num_tokens, Group.LEARNS, "here the 20 most probable tokens are looked at")
    else:
        draft.take("eaft_k")
        draft.take("eaft_alpha")
    draft.rename({"rl_beta": "beta", "kto_desirable_weight": "desirable_weight"})
    draft.rename({"kto_undesirable_weight": "undesirable_weight", "dpo_label_smoothing": "label_smoothing"})
    for key in ("reward_model", "process_reward_model", "num_labels", "diffusion", "ebft", "trl", "vllm"):
        value = draft.take(key)
        if value is not None and not is_false(value) and not draft.other_kind:
            draft.refuse(key, value, other_kits.REWARDS if key != "num_labels" else "causal language models only")
        draft.take("center_rewards_coefficient")
    reads_images = is_true(draft.given.get("skip_prepare_dataset")) and is_false(
        draft.given.get("remove_unused_columns")
    )
    processor = draft.take("processor_type")
    if processor is not None and reads_images:
        draft.refuse("processor_type", processor, "it reads images or sound, and this kit only text")
    elif processor is not None:
        draft.drop("processor_type", processor, Group.NEEDLESS, "of text, the tokenizer is all that is read")
    draft.take("freeze_mm_modules")


def _take_method(draft: Draft) -> None:
    _take_qat(draft)
    adapter, in_4bit = draft.take("adapter"), draft.is_on("load_in_4bit")
    if adapter not in (None, "lora", "qlora"):
        put_adapter_type(draft, adapter, "adapter")
    if adapter is None:
        draft.put("method", "full")
        for key in [key for key in draft.given if key.startswith("lora_") and key != "lora_model_dir"]:
            draft.take(key)  # read by no one: there is no adapter
    else:
        draft.put("method", "qlora" if in_4bit or adapter == "qlora" else "lora")
        draft.default("lora_dropout", draft.take("lora_dropout", 0.0), KIT)
        draft.notes.pop("lora_dropout", None)
        put_initialisation(draft, draft.take("peft_init_lora_weights"), "peft_init_lora_weights")
        targets = draft.take("lora_target_modules")
        if draft.is_on("lora_target_linear"):
            draft.put("lora_target_modules", "all-linear")
        elif targets is not None:
            put_targets(draft, targets)
    draft.take("full_finetune")
    patterns = draft.take("unfrozen_parameters")
    if patterns is not None and adapter is not None:
        reason = "beside an adapter, lora_modules_to_save names whole modules that train"
        draft.drop("unfrozen_parameters", patterns, Group.LEARNS, reason)
    elif patterns is not None:
        put_patterns(draft, "unfrozen_parameters", patterns, "train_only")


def _take_qat(draft: Draft) -> None:
    if not isinstance(given := draft.take("qat"), dict):
        return
    types = [str(given.get(key) or "").rpartition(".")[2] for key in ("activation_dtype", "weight_dtype")]
    scheme = _QAT.get((types[0], types[1] or "int8"))
    if scheme is None:
        reason = "only rounding to integers of 4 and 8 bits is offered; with --drop, nothing is rounded"
        draft.drop("qat", " and ".join(filter(None, types)), Group.LEARNS, reason)
        return
    draft.put("qat", scheme, "without a zero point" if scheme == "int4_weight_only" else "")
    draft.put("qat_group_size", given.get("group_size") or 32)
    draft.speed("torch_compile", "with qat no layer is compiled")
    if is_true(given.get("quantize_embedding")):
        draft.drop("qat.quantize_embedding", True, Group.LEARNS, "embeddings are not rounded")
    if steps := given.get("fake_quant_after_n_steps"):
        draft.drop("qat.fake_quant_after_n_steps", steps, Group.LEARNS, "all steps round, from the first one")


# By the types of inputs and weights.
_QAT = {
    ("", "int4"): "int4_weight_only",
    ("", "int8"): "int8_weight_only",
    ("int8", "int4"): "int8_dynamic_activation_int4_weight",
    ("int8", "int8"): "int8_dynamic_activation_int8_weight",
}


def _take_schedule(draft: Draft) -> None:
    given = draft.given
    if (share := draft.take("cosine_min_lr_ratio")) is not None:
        if number(share) == 1:
            given["lr_scheduler_type"] = "constant_with_warmup"  # a cosine that ends where it begins
        elif number(given.get("cosine_constant_lr_ratio") or 0):
            draft.drop("cosine_min_lr_ratio", share, Group.LEARNS, "no schedule here has it")
        else:
            draft.put("min_lr_rate", share)
            given["lr_scheduler_type"] = "cosine_with_min_lr"
    constant = draft.take("cosine_constant_lr_ratio")
    if constant is not None and number(constant):
        draft.drop("cosine_constant_lr_ratio", constant, Group.LEARNS, "no schedule here has it")
    if (scale := draft.take("embedding_lr_scale")) is not None:
        rate = draft.typed.get("learning_rate", draft.values.get("learning_rate"))
        if rate is None:
            draft.drop("embedding_lr_scale", scale, Group.LEARNS, "a share of learning_rate, which is missing")
        else:
            draft.put("embedding_learning_rate", number(scale) * number(rate), f"{shown(scale)} x {shown(rate)}")
    if (epsilon := draft.take("adam_eps")) is not None:
        draft.put("adam_epsilon", epsilon)


def _take_special_tokens(draft: Draft) -> None:
    """A padding token is never learned; the end of a text is."""
    tokens = draft.take("special_tokens", {})
    if isinstance(draft.values.get("new_tokens"), dict):  # old files have `tokens` as a mapping of them
        tokens = {**draft.values.pop("new_tokens"), **tokens}
    if not isinstance(tokens, dict):
        draft.drop("special_tokens", tokens, Group.LEARNS, "found no mapping of tokens")
        return
    for key, value in tokens.items():
        name = f"special_tokens.{key}"
        ends = key == "eos_token" and value not in ("</s>", "<|endoftext|>", "<|end_of_text|>")
        if value is None:
            continue
        if key == "additional_special_tokens":
            draft.put("new_tokens", as_list(value))
        elif ends and draft.values.get("chat_template") is None:
            draft.drop(name, value, Group.LEARNS, "the tokenizer's own ends a text; a chat template ends its turns")
        else:
            draft.drop(name, value, Group.NEEDLESS, "the tokenizer has its own, and a chat template ends its turns")


def _take_plugins(draft: Draft) -> None:
    for plugin in as_list(draft.take("plugins")):
        name = re.sub(r"^axolotl\.integrations\.", "", str(plugin)).split(".")[0]
        if name in _PLUGINS_OF_SPEED.split():
            draft.drop("plugins", name, Group.SPEED, other_kits.KERNELS)
        elif name == "swanlab":
            continue  # its keys were read
        else:
            draft.drop("plugins", name, Group.LEARNS, f"not known here: {shown(plugin)}")
