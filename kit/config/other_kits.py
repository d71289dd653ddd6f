"""Names of settings in other kits, each with what to use instead in this kit."""

from typing import Any

_SUPERVISED = "this kit does supervised fine-tuning only: nothing learns from preferences or rewards"
_PARALLEL = "docs/parallelism.md has the reason, and what does its work here"
_DEEPSPEED = f"DeepSpeed is not offered; use --config fsdp; {_PARALLEL}"
_DIMENSIONS = {"tensor": "tp", "context": "cp", "sequence": "sp", "pipeline": "pp", "expert": "ep"}
_NOT_OFFERED = {
    spelling: f"{name} parallelism is not offered; {_PARALLEL}"
    for name, short in _DIMENSIONS.items()
    for spelling in (
        *(short, f"{short}_size", f"{name}_parallel", f"{name}_parallel_size", f"{name}_parallel_degree"),
        *(f"{name}_model_parallel_size", f"parallelism_config_{short}_size"),
    )
}
_MACHINES = "a key of the Accelerate config (--config); docs/multi-node.md"
_OWN_LOSS = "the loss is code: docs/architecture.md#an-objective-or-another-loss shows how to write another"
_FLASH = "use --attn_implementation flash_attention_2; the default needs no package"
_GROUPS = "processes are grouped by the Accelerate config: --config fsdp_hybrid"
_NO_COMPRESSION = "gradients are always reduced in float32: compression changes what is learned"
_STATIC_GRAPH = "not offered: with it, torch's DDP cannot accumulate micro-batches"
_UNUSED = "not needed: weights that no text reaches are frozen, and others without a gradient are refused by name"
_OTHER_TRAINING = ("dpo", "orpo", "kto", "cpo", "simpo", "ipo", "ppo", "grpo", "rloo", "rl", "reward", "ref", "pref")
_PRECISION = "precision comes from the Accelerate config: mixed_precision"
FLOAT32 = "float32: `accelerate launch --mixed_precision no` without --config, or mixed_precision: no in a copy of it"
FP16 = f"fp16 needs loss scaling, which skips steps. On most GPUs bf16 is as fast; on a T4 or V100, {FLOAT32}"
GGUF = "a GGUF file holds weights for inference; take the model that it was made from"
OTHER_KITS = {
    "beta": _SUPERVISED,
    "loss_type": _SUPERVISED,
    "use_vllm": "nothing is generated for training; vLLM opens final/ afterwards",
    "loss": _OWN_LOSS,
    "custom_loss": _OWN_LOSS,
    "loss_function": _OWN_LOSS,
    "gradient_accumulation_steps": "it is global_batch_size / (processes x per_device_train_batch_size)",
    "eval_batch_size": "use per_device_eval_batch_size",
    "max_samples": "use max_train_samples",
    "bf16": f"{_PRECISION}: bf16, as in --config single",
    "fp16": f"{_PRECISION}; {FP16}",
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "mixed_precision": "it belongs in the Accelerate config (--config)",
    "load_in_4bit": "use --method qlora",
    "load_in_8bit": "8-bit bases are not offered; use --method qlora",
    "use_peft": "use --method lora",
    "use_lora": "use --method lora",
    "adapter": "use --method lora or qlora",
    "finetuning_type": "use --method full, lora or qlora",
    "fsdp": "strategy comes from the Accelerate config: --config fsdp",
    "fsdp_config": "strategy comes from the Accelerate config: --config fsdp",
    "deepspeed": _DEEPSPEED,
    "zero_stage": _DEEPSPEED,
    **_NOT_OFFERED,
    "dp_replicate_size": _GROUPS,
    "dp_shard_size": _GROUPS,
    "bucket_cap_mb": "use ddp_bucket_cap_mb",
    "find_unused_parameters": _UNUSED,
    "ddp_find_unused_parameters": _UNUSED,
    "static_graph": _STATIC_GRAPH,
    "ddp_static_graph": _STATIC_GRAPH,
    "gradient_as_bucket_view": "always on: gradients lie in DDP's buckets",
    "ddp_broadcast_buffers": "always on, as torch's default",
    "ddp_comm_hook": _NO_COMPRESSION,
    "comm_hook": _NO_COMPRESSION,
    "ddp_backend": "it is NCCL on GPUs and gloo on CPUs",
    "num_machines": _MACHINES,
    "machine_rank": _MACHINES,
    "main_process_ip": _MACHINES,
    "main_process_port": _MACHINES,
    "device": "devices are chosen by --config, and on a Mac it is the CPU: docs/strategies.md",
    "flash_attn": _FLASH,
    "flash_attention": _FLASH,
    "use_flash_attention_2": _FLASH,
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
    "lr_scheduler_kwargs": "use min_lr_rate and lr_decay_steps",
    "min_lr": "use min_lr_rate: a share of learning_rate",
    "min_lr_ratio": "use min_lr_rate",
    "cosine_min_lr_ratio": "use min_lr_rate, with lr_scheduler_type cosine_with_min_lr",
    "num_decay_steps": "use lr_decay_steps",
    "warmup_ratio": "use warmup_steps: below 1 it is a share of all steps",
    "optimizer": "use optim",
    "lora_rank": "use lora_r",
    "lora_target": "use lora_target_modules",
    "target_modules": "use lora_target_modules",
    "unfrozen_parameters": "use train_only",
    "freeze_trainable_modules": "use train_only",
    "template": "use chat_template",
    "do_eval": "use eval_dataset or eval_split_size",
    "ignore_data_skip": "a resumed run never repeats or skips data; use resume_from_checkpoint",
    "resume": "use resume_from_checkpoint (default auto)",
    "push_to_hub": "nothing is uploaded; the run's final/ is an ordinary model folder",
    "local_rank": "ranks come from the launcher's environment",
    "num_gpus": "use num_processes",
    "nproc_per_node": "before the script it is torchrun's; after it use --num_processes",
    "dataset_config_name": "use dataset_config",
    "revision": "use model_revision, or dataset_revision",
    "dataset_mixer": "use dataset: a list of {path: ..., weight: ...}",
    "dataset_mixture": "use dataset: a list of {path: ..., weight: ...}",
    "interleave_probs": "use dataset: a list of {path: ..., weight: ...}",
    "mix_strategy": "use dataset: a list of {path: ..., weight: ...}, and mixing",
    "sample_packing": "use packing",
    "neat_packing": "use packing",
    "packed": "use packing",
    "pack_sequences": "use packing",
    "packing_strategy": "use packing: best fit over the whole data set",
    "padding_free": "use packing",
    "group_by_length": "always on: a micro-batch has samples of similar length; packing has no padding at all",
    "train_on_inputs": "use train_on: all",
    "train_on_input": "use train_on: all",
    "train_on_prompt": "use train_on: all",
    "assistant_only_loss": "use train_on: assistant, the default",
    "completion_only_loss": "use train_on: assistant, the default",
    "mask_history": "use train_on: last",
    "roles_to_train": "use train_on: assistant, last or all; or give a message train: false",
    "truncation_mode": "use excess_length_strategy: the end is what is cut off",
    "preprocessing_num_workers": "use dataset_num_proc",
    "dataset_processes": "use dataset_num_proc",
    "buffer_size": "use shuffle_buffer_size",
    "dataset_streaming": "use streaming",
    "dataset_text_field": "use dataset_columns: column=text",
    "dataset_prepared_path": "`kit prepare` fills the cache, which is in $KIT_CACHE",
}


def other_kits_word(name: str, value: Any = None) -> str:
    """Return what to use instead of the setting ``name`` of another kit; empty if no kit known here has it.

    Args:
        value: what the user gave it.
    """
    if name not in OTHER_KITS and name.partition("_")[0] in _OTHER_TRAINING:
        return _SUPERVISED
    return OTHER_KITS.get(name, "") + (f"; {GGUF}" if name in OTHER_KITS and str(value).endswith(".gguf") else "")
