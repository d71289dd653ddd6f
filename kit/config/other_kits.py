"""Names of settings in other kits, each with what to use instead in this kit.

They are those of transformers' ``TrainingArguments``, TRL, axolotl, LLaMA-Factory and Unsloth. What has no
counterpart here stands by subject in ``other_words``, with the versions that were read.
"""

import re
from typing import Any

from kit.config.other_words import (
    ADAPTERS,
    GENERATE,
    KERNELS,
    OFFLOADING,
    ONE_LOOP,
    OPTIMISERS,
    REWARDS,
    VISION,
    WORDS,
)

PARALLEL = "docs/parallelism.md has the reason, and what does its work here"
_DEEPSPEED = f"DeepSpeed is not offered; use --config fsdp; {PARALLEL}"
_DIMENSIONS = {"tensor": "tp", "context": "cp", "sequence": "sp", "pipeline": "pp", "expert": "ep"}
_NOT_OFFERED = {
    spelling: f"{name} parallelism is not offered; {PARALLEL}"
    for name, short in _DIMENSIONS.items()
    for spelling in (
        *(short, f"{short}_size", f"{name}_parallel", f"{name}_parallel_size", f"{name}_parallel_degree"),
        *(f"{name}_model_parallel_size", f"parallelism_config_{short}_size"),
    )
}
_OWN_LOSS = "the loss is code: docs/architecture.md#an-objective-or-another-loss shows how to write another"
_OTHER_TRAINING = "ppo grpo rloo rl rlhf reward rm gkd gspo dapo nca online judge vllm trl ebft".split()
_REFERENCE = "leave it out: the reference is the model as it was at the start, and there is no other"
_LIKELIHOOD = "not offered with dpo; use objective: orpo, or cpo with cpo_alpha, which learn the chosen answers too"
_DPO_VARIANT = "not offered; use dpo_loss, which lists the losses of objective dpo"
_PRECISION = "precision comes from the Accelerate config: mixed_precision"
FLOAT32 = "float32: `accelerate launch --mixed_precision no` without --config, or mixed_precision: no in a copy of it"
FP16 = f"fp16 needs loss scaling, which skips steps. On most GPUs bf16 is as fast; on a T4 or V100, {FLOAT32}"
_PURE_BF16 = (
    "not offered: weights in bf16 lose each update below 2^-9 of a weight; use optim: adamw_bf16, whose weights and "
    "moments are in bf16 too, and which rounds at random"
)
GGUF = "a GGUF file holds weights for inference; take the model that it was made from"
_MIXTURE = "use dataset: a list of {path: ..., weight: ...}"
FP8 = "use --fp8 true, with --torch_compile true; it has no further settings"
_TOKENIZER = "the tokenizer is that of the model, as it is; use new_tokens to add tokens, chat_template for a template"
UPLOAD = "use push_to_hub: OWNER/NAME; or afterwards `kit push runs/NAME OWNER/NAME`"
_LOGIN = "the hub's token is never a setting: `hf auth login`, or the variable HF_TOKEN"
_MERGE = "not a setting of a run; afterwards `kit export runs/NAME/final --output_dir merged` merges an adapter"
_NF4 = "use method: qlora; its 4-bit weights are always NF4 with double quantisation"
_INT8 = (
    "not offered: bitsandbytes rounds activations to 8 bits but for columns that a whole micro-batch chooses, so "
    "the loss would depend on what else is in it; use --method qlora, or lora"
)
_FROM_CONFIG = "leave it out: it is read from the model's config"
_IN_A_RUN = "leave it out: the kit does it in every run"
_TRAINER = "leave it out: it steers the Trainer of transformers, which is not used here"
_CACHE = "tokenised data are cached in $KIT_CACHE, and made anew when anything changes: `kit cache` lists them"
_BEST = "leave it out: each metric_for_best_model knows whether greater is better"
_WANDB = "it is wandb's own: the variables WANDB_ENTITY, WANDB_MODE, ... reach it"

# Answer to words. "use NAME" names a setting of this kit, for programs too.
_ANSWERS = {
    # --- the model
    "use model_name_or_path": """
        base_model model model_name model_id model_path pretrained_model_name_or_path base_model_name_or_path
        model_dir""",
    "use model_revision, or dataset_revision": "revision revision_of_model",
    "use adapter_name_or_path": "lora_model_dir adapter_path lora_path lora_name_or_path peft_model_id adapter_folder",
    "use chat_template": "template chat_template_path chat_template_jinja prompt_template prompt_style conversation",
    "use chat_template_kwargs: enable_thinking=false, or true": "enable_thinking preserve_thinking",
    "use new_tokens": """
        tokens special_tokens additional_special_tokens add_tokens add_special_tokens added_tokens_overrides
        new_special_tokens_config""",
    "leave it out: the embedding grows by the new_tokens alone": """
        resize_vocab resize_token_embeddings resize_token_embeddings_to_32x""",
    _TOKENIZER: """
        tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_config tokenizer_type
        tokenizer_use_fast
        use_fast_tokenizer tokenizer_legacy tokenizer_use_mistral_common tokenizer_kwargs eos_token pad_token bos_token
        unk_token padding_side split_special_tokens""",
    "use system_prompt": "default_system default_system_message system_message",
    _FROM_CONFIG: """
        model_type model_class model_config model_init_kwargs processor_type processor_config base_model_config
        is_encoder_decoder
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model rope_scaling
        rope_theta experts_implementation output_router_logits""",
    "causal language models only: they have no labels or classes": """
        num_labels label_names id2label label2id problem_type""",
    "not offered: weights come from model_name_or_path": "train_from_scratch reinit_weights init_config",
    "use attn_implementation": "attention attn_impl sdp_attention eager_attention attn_type",
    "not offered: attn_implementation lists the kernels": """
        flex_attention xformers_attention s2_attention shift_attn sage_attention use_sage_attention ring_attn_func""",
    "use --attn_implementation flash_attention_3, with --packing": "flash_attention_3 use_flash_attention_3",
    "use --attn_implementation flash_attention_2; the default needs no package": """
        flash_attn flash_attention use_flash_attention_2 use_flash_attn flash_attention_2""",
    VISION: """
        freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_mm_modules media_dir
        finetune_vision_layers finetune_language_layers image_size image_resize_algorithm processor_kwargs""",
    # --- the method
    "use method: full": "full_finetuning full_finetune",
    "use method: lora": "use_peft use_lora peft",
    "use --method qlora": "load_in_4bit quantization_bit use_qlora",
    _INT8: "load_in_8bit",
    "use method: lora or qlora": "adapter peft_type",
    "use --method full, lora or qlora": "finetuning_type train_type tuner_type training_type",
    _NF4: """
        quantization_method quantization_type double_quantization use_bnb_nested_quant quantization quant_config
        bnb_config_kwargs quantization_config compute_dtype""",
    "use lora_r": "lora_rank r rank",
    "use lora_alpha": "alpha",
    "use lora_target_modules": """
        lora_target target_modules lora_target_parameters
        target_parameters""",
    "use lora_target_modules: all-linear, the default": "lora_target_linear target_all_linear",
    "use lora_modules_to_save": "modules_to_save additional_target",
    "use adapter_type: oft": "use_oft",
    "use lora_target_modules, with adapter_type: oft": "oft_target",
    "use oft_block_size: the inputs of a module, divided by the number of its blocks": "oft_rank",
    "use init_lora_weights": "peft_init_lora_weights init_weights lora_init",
    "use loraplus_lr_ratio": "lorap_lr_ratio",
    "use embedding_learning_rate": "embedding_lr loraplus_lr_embedding lorap_emb_lr",
    "use use_rslora": "peft_use_rslora rslora",
    "use use_dora": "peft_use_dora dora",
    ADAPTERS: """
        loftq_config loftq_bits lora_bias lora_task_type task_type bias
        lora_fan_in_fan_out relora_steps module_dropout layers_to_transform peft_layers_to_transform layers_pattern
        use_vera lora_alpha_pattern lora_rank_pattern""",
    "use train_only": """
        unfrozen_parameters freeze_trainable_modules freeze_trainable_layers freeze_extra_modules
        trainable_parameters""",
    "use freeze": "freeze_layers freeze_parameters frozen_parameters",
    _MERGE: "merge_lora create_new_adapter lora_on_cpu merge_method merge_weights save_merged",
    "not offered: methods are full, lora and qlora": """
        use_llama_pro mixture_of_depths relora use_onebitllms""",
    # --- the data
    "use dataset": """
        datasets dataset_name dataset_path train_file train_files train_dataset train_data train_path
        train_datasets data
        data_path data_files data_dir dataset_dir pretraining_dataset dataset_id train_split_file data_file""",
    "use eval_dataset": """
        validation_file dataset_val val_dataset val_data val_file valid_file validation_dataset validation_data
        test_dataset test_datasets test_file eval_data eval_file eval_path dev_file dev_data""",
    "use eval_split_size": """
        val_set_size val_size validation_split test_size eval_split validation_split_percentage eval_fraction
        eval_ratio""",
    "use eval_dataset or eval_split_size": "do_eval",
    "use dataset_split": "dataset_train_split train_split",
    "use eval_dataset_split": "dataset_test_split test_split dataset_eval_split",
    "use dataset_config": "dataset_config_name subset dataset_subset",
    _MIXTURE: "dataset_mixer dataset_mixture interleave_probs",
    f"{_MIXTURE}, and mixing": "mix_strategy",
    "use max_train_samples, or max_eval_samples for what is evaluated": "max_samples num_samples",
    "use max_train_samples": "num_train_samples",
    "use max_eval_samples": "num_eval_samples",
    "use dataset_columns: column=text": "dataset_text_field text_column text_field",
    "use dataset_columns": """
        column_mapping field_messages field_instruction field_input field_output field_chosen field_rejected
        message_property_mappings chosen_column rejected_column
        instruction_column output_column prompt_column columns""",
    "use dataset_num_proc": "preprocessing_num_workers dataset_processes num_proc",
    "use shuffle_buffer_size": "buffer_size streaming_multipack_buffer_size",
    "use streaming": "dataset_streaming",
    "use shuffle": "shuffle_dataset disable_shuffling shuffle_merged_datasets shuffle_data data_shuffle",
    "use dedup": "dataset_exact_deduplication",
    "use max_length": """
        max_seq_length sequence_len cutoff_len seq_len seq_length sequence_length max_seq_len block_size context_length
        model_max_length max_token_length max_tokens max_input_length eval_sequence_len""",
    "use excess_length_strategy": "truncation truncation_side truncate",
    "use excess_length_strategy: the end is what is cut off": "truncation_mode",
    "use packing": """
        sample_packing neat_packing packed pack_sequences padding_free use_packing use_packed_sequences
        dpo_padding_free""",
    "use packing: best fit over the whole data set": "packing_strategy",
    "leave it out: evaluation data are not packed, which changes no loss": "eval_sample_packing eval_packing",
    "leave it out: a micro-batch is as wide as its longest row; packing fills rows": """
        pad_to_sequence_len pad_to_multiple_of pad_to_max_length""",
    "always on: a micro-batch has samples of similar length; packing has no padding at all": """
        group_by_length length_column_name train_sampling_strategy""",
    "use train_on: all": "train_on_inputs train_on_prompt",
    "use train_on: assistant, the default": "assistant_only_loss completion_only_loss train_on_responses_only",
    "use train_on: last": "mask_history train_on_last_step_only",
    "use train_on: assistant, last or all; or give a message train: false": "roles_to_train",
    "leave it out: the token that ends a turn is learned, as the chat template has it": """
        train_on_eos train_on_eot eot_tokens""",
    "`kit prepare` fills the cache, which is in $KIT_CACHE": "dataset_prepared_path tokenized_path",
    _CACHE: """
        overwrite_cache preprocessing_batch_size skip_prepare_dataset dataset_kwargs dataset_keep_in_memory
        preprocess_iterable data_shared_file_system""",
    "the hub's cache is where the variable HF_HOME says": "cache_dir",
    "a chat template writes tools, as it was made to: use chat_template": "tool_format",
    "leave it out: columns that are not used do no harm, and are named": "remove_unused_columns",
    # --- the steps
    "it is global_batch_size / (processes x per_device_train_batch_size)": """
        gradient_accumulation_steps gradient_accumulation gradient_accumulation_iters accumulate_grad_batches""",
    "use global_batch_size": "total_batch_size total_train_batch_size effective_batch_size",
    "use global_batch_size (a step) or per_device_train_batch_size (a micro-batch)": "batch_size train_batch_size",
    "use per_device_train_batch_size": """
        micro_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size per_device_batch_size""",
    "use per_device_train_batch_size: auto": "auto_find_batch_size",
    "use per_device_eval_batch_size": "eval_batch_size val_batch_size per_gpu_eval_batch_size",
    "use num_train_epochs": "num_epochs epochs max_epochs n_epochs num_train_epoch epoch",
    "use max_steps": "max_train_steps num_train_steps max_steps_per_epoch num_steps train_steps total_steps max_iters",
    "use learning_rate": "lr learning_rates",
    "use lr_scheduler_type": "lr_scheduler scheduler lr_schedule",
    "use min_lr_rate and lr_decay_steps": "lr_scheduler_kwargs",
    "use min_lr_rate: a share of learning_rate": "min_lr eta_min",
    "use min_lr_rate": "min_lr_ratio",
    "use min_lr_rate, with lr_scheduler_type cosine_with_min_lr": "cosine_min_lr_ratio",
    "use lr_decay_steps, with lr_scheduler_type warmup_stable_decay": "cosine_constant_lr_ratio",
    "use lr_decay_steps": "num_decay_steps",
    "use warmup_steps: below 1 it is a share of all steps": "warmup_ratio lr_warmup_ratio",
    "use warmup_steps": "num_warmup_steps lr_warmup_steps warmup",
    "use optim": "optimizer optim_type optimizer_type",
    "use adam_epsilon": "adam_eps adam_epsilon2 eps",
    "use max_grad_norm": "clip_grad_norm gradient_clipping grad_clip gradient_clip_val max_norm",
    "use router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef",
    OPTIMISERS: """
        optim_args optim_target_modules use_galore use_apollo use_badam
        use_adam_mini adam_beta3
        dion_lr dion_momentum lr_groups lr_quadratic_warmup""",
    "use neftune_noise_alpha": "neft_alpha noisy_embedding_alpha neftune_alpha noise_alpha",
    "use objective: eaft": "eaft use_eaft_loss use_eaft",
    "leave it out: objective eaft looks at the 20 most probable tokens": "eaft_k",
    "use optim: muon": "use_muon",
    _OWN_LOSS: """
        loss custom_loss loss_function use_asft_loss asft_alpha
        compute_loss_func""",
    # --- preferences
    **{f"use objective: {name}": name for name in ("dpo", "orpo", "simpo", "cpo", "kto")},
    "use objective: dft": "dft use_dft_loss",
    "use objective: dpo, with dpo_loss: ipo": "ipo",
    f"use objective; dpo_loss lists the losses of objective dpo; {_OWN_LOSS}": "loss_type pref_loss dpo_loss_type",
    "use beta": "dpo_beta pref_beta rl_beta kto_beta orpo_beta",
    "use beta: with objective orpo it is the weight of the odds ratio": "orpo_alpha",
    "use label_smoothing": "dpo_label_smoothing",
    "use simpo_gamma": "gamma",
    "use simpo_gamma: this ratio times beta": "gamma_beta_ratio",
    "use dpo_loss: sigmoid_norm": "dpo_norm_loss",
    "use desirable_weight": "kto_desirable_weight kto_chosen_weight chosen_weight",
    "use undesirable_weight": "kto_undesirable_weight kto_rejected_weight rejected_weight",
    _LIKELIHOOD: "pref_ftx rpo_alpha sft_weight",
    _DPO_VARIANT: """
        loss_weights dpo_loss_weights use_weighting dpo_use_weighting ld_alpha discopop_tau f_divergence_type
        f_alpha_divergence_coef pref_bco_weight""",
    "use precompute_reference": "precompute_ref_log_probs",
    "use per_device_eval_batch_size: a reference that is computed beforehand has it too": "precompute_ref_batch_size",
    _REFERENCE: """
        reference_model sync_ref_model use_ref_model force_use_ref_model model_adapter_name""",
    "use objective: simpo, orpo or cpo, which have no reference": "reference_free",
    "use max_length, for prompt and answer together: where they are longer, the prompt is cut": """
        max_prompt_length max_completion_length max_target_length""",
    "always: the loss of a step is a mean over the tokens of all processes": "average_tokens_across_devices",
    "nothing is generated for training; vLLM opens final/ afterwards": "use_vllm",
    "use gradient_checkpointing": """
        activation_checkpointing enable_activation_checkpointing use_gradient_checkpointing
        disable_gradient_checkpointing activation_checkpoint""",
    "use gradient_checkpointing: selective": "selective_checkpointing",
    "leave it out: checkpointing is never reentrant": """
        gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc use_reentrant""",
    "use activation_offload, with gradient_checkpointing": "activation_offloading enable_activation_offloading",
    OFFLOADING: "cpu_offload offload layer_offloading offload_folder",
    "use torch_compile": "compile use_compile compile_model enable_compile",
    "use torch_compile: layers are compiled by inductor, in its default mode": """
        torch_compile_backend torch_compile_mode torch_compile_options dynamo_backend dynamo_mode""",
    KERNELS: """
        use_liger_kernel enable_liger_kernel use_liger liger liger_kernel_config use_unsloth use_unsloth_gc
        cut_cross_entropy
        dpo_use_liger_kernel use_liger_loss
        use_kernels use_kernel lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel tiled_mlp plugins
        chunked_cross_entropy use_v1_kernels kernel_config use_scattermoe use_sonicmoe fused_attn_kernel""",
    # --- evaluation, output
    "use eval_on_start": "eval_on_begin eval_before_training sanity_check",
    "use eval_strategy": "evaluation_strategy do_train_eval",
    "use eval_strategy: epoch, or eval_steps": "evals_per_epoch val_check_interval eval_every eval_interval",
    "use save_strategy: epoch, or save_steps": "saves_per_epoch save_every save_interval save_freq save_every_n_epochs",
    "use save_steps": "checkpointing_steps",
    "use save_total_limit": "keep_checkpoints max_checkpoints checkpoints_total_limit",
    "use save_only_model": "save_model_only save_weights_only",
    "use logging_steps": "log_every_n_steps log_interval log_steps logging_interval",
    "use logging_steps: 1, the default": "logging_first_step logging_strategy",
    "use keep_best: the checkpoint with the best metric_for_best_model is kept, and the run prints how to export it": (
        "load_best_model_at_end save_best"
    ),
    _BEST: "greater_is_better",
    "use early_stopping_patience": "early_stopping early_stopping_steps patience",
    "use loss_spike_ratio, or max_nonfinite_steps": "loss_watchdog_threshold loss_watchdog_patience",
    "use predict_with_generate": """
        compute_accuracy do_predict eval_causal_lm_metrics do_causal_lm_eval compute_metrics
        generate_during_eval dpo_generate_during_eval""",
    "use max_new_tokens": "generation_max_length max_gen_length eval_max_new_tokens",
    GENERATE: """
        eval_num_beams num_beams top_k do_sample infer_backend infer_dtype use_cache
        use_kv_cache eval_table_size generate_samples""",
    "use output_dir": "out_dir save_dir logging_dir output_path output output_folder log_dir save_path",
    "use overwrite_output_dir": "overwrite",
    "use resume_from_checkpoint (default auto)": """
        resume auto_resume_from_checkpoints resume_training resume_checkpoint checkpoint checkpoint_dir
        checkpoint_path""",
    "a resumed run never repeats or skips data; use resume_from_checkpoint": "ignore_data_skip",
    "use report_to": "use_tensorboard use_wandb log_with logger trackers",
    "use run_name": "wandb_name wandb_run_name trackio_run_name wandb_run experiment_name",
    "use project": "wandb_project trackio_project_name project_name wandb_project_name",
    "always: report.html has the curves": """
        plot_loss include_effective_tokens_per_second include_tkps include_tokens_per_second
        include_num_input_tokens_seen""",
    UPLOAD: "push_dataset_to_hub wandb_log_model save_to_hub hub_model_id repo_id",
    _LOGIN: "hf_use_auth_token token use_auth_token hf_token hf_hub_token api_key",
    "always: weights are saved as safetensors": "save_safetensors",
    "always: an unknown key is refused": "strict",
    # --- processes and precision
    "use seed": "random_state data_seed random_seed",
    "use deterministic": "full_determinism",
    f"{_PRECISION}: bf16, as in --config single": "bf16 bfloat16",
    _PURE_BF16: "pure_bf16",
    f"{_PRECISION}; {FP16}": "fp16 float16 half",
    _PRECISION: """
        dtype torch_dtype precision float32 upcast_layernorm upcast_lmhead_output bf16_full_eval
        fp16_full_eval""",
    "it belongs in the Accelerate config (--config)": "mixed_precision",
    FP8: "fp8_recipe fp8_format fp8_config fp8_backend fp8_enable_fsdp_float8_all_gather",
    "strategy comes from the Accelerate config: --config fsdp": """
        fsdp fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap fsdp_final_state_dict_type device_map
        distributed_type accelerator_config parallelism_config dist_config ddp distributed_backend""",
    "a key of an Accelerate config, which --config names": """
        compute_environment rdzv_backend same_network downcast_bf16 main_training_function tpu_env""",
    _DEEPSPEED: "deepspeed zero_stage deepspeed_config ds_config deepcompile",
    "processes are grouped by the Accelerate config: --config fsdp_hybrid": "dp_replicate_size dp_shard_size",
    "use ddp_bucket_cap_mb": "bucket_cap_mb",
    "not needed: weights that no text reaches are frozen, and others without a gradient are refused by name": """
        find_unused_parameters ddp_find_unused_parameters""",
    "not offered: with it, torch's DDP cannot accumulate micro-batches": "static_graph ddp_static_graph",
    "always on: gradients lie in DDP's buckets": "gradient_as_bucket_view",
    "always on, as torch's default": "ddp_broadcast_buffers",
    "gradients are always reduced in float32: compression changes what is learned": "ddp_comm_hook comm_hook",
    "it is NCCL on GPUs and gloo on CPUs": "ddp_backend",
    "a key of the Accelerate config (--config); docs/multi-node.md": """
        num_machines machine_rank main_process_ip main_process_port nnodes num_nodes nodes node_rank master_addr
        master_port""",
    "the devices are those of the machine; use_cpu in the Accelerate config keeps to the CPU: docs/strategies.md": """
        device use_cpu no_cuda use_mps_device""",
    "after the script it is --config; accelerate launch takes --config_file before it": "config_file",
    "ranks come from the launcher's environment": "local_rank world_size",
    "use num_processes": "num_gpus gpus n_gpus n_gpu gpu_count world_size_per_node devices num_devices gpu_ids",
    "before the script it is torchrun's; after it use --num_processes": "nproc_per_node",
    "torch's variables show what ranks do: docs/debugging.md": "debug",
    "use profile_steps, which begins after the first two steps": "profiler profiler_steps profiler_steps_start",
    _IN_A_RUN: "do_train low_cpu_mem_usage",
    "leave it out: the first checkpoint is that of save_steps": "save_first_step",
    _TRAINER: """
        prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics eval_delay enable_jit_checkpoint restore_callback_states_from_checkpoint
        torch_empty_cache_steps
        log_on_each_node log_level log_level_replica disable_tqdm trainer_cls callbacks ignore_pad_token_for_loss
        gc_steps gc_collect_steps skip_memory_metrics logging_nan_inf_filter save_on_each_node label_pad_token_id
        padding_value""",
    "use objective: sft, the default": "stage trainer task training_objective",
    "use lora_dropout, which is 0 by default; a model's own dropout is that of its config": "disable_dropout",
}
# Answers to all names that begin so.
_FAMILIES = {
    **dict.fromkeys(_OTHER_TRAINING, REWARDS),
    "ref": _REFERENCE,
    "dataloader": "leave it out: samples are tokenised ahead, and the next batch is read while a step runs",
    "hub": UPLOAD,
    "wandb": _WANDB,
    "trackio": "trackio's own variables reach it; use report_to, run_name and project",
    **dict.fromkeys(
        ("swanlab", "use_swanlab", "use_mlflow", "mlflow", "use_comet", "comet"),
        "use report_to, run_name and project; a tracker's own variables reach it",
    ),
    **dict.fromkeys(
        ("use_otel", "otel", "clearml", "aim", "dvclive"),
        "not offered: clearml and aim give a run another id when it is continued, and dvclive takes no loss beside "
        "loss/name; report_to has others",
    ),
    **dict.fromkeys(("bnb_4bit", "bnb"), _NF4),
    **dict.fromkeys(("galore", "apollo", "badam", "qgalore", "dion", "lomo"), OPTIMISERS),
    "muon": "leave it out: optim: muon has the settings of torch's",
    **dict.fromkeys(("pissa", "relora", "loftq", "vera"), ADAPTERS),
    **dict.fromkeys(("liger", "flash_attn"), KERNELS),
    **dict.fromkeys(("image", "video", "audio"), VISION),
    **dict.fromkeys(("export", "gptq", "awq"), _MERGE),
    "nvfp4": "not offered: products of 4 bits; fp8 is",
    **dict.fromkeys(("megatron", "use_megatron", "use_mca", "hyper_parallel", "kt", "use_kt", "tpu"), ONE_LOOP),
    "sglang": GENERATE,
}
OTHER_KITS = {
    word: answer for table in (WORDS, _ANSWERS) for answer, words in table.items() for word in words.split()
} | {
    "hub_token": _LOGIN,
    **_NOT_OFFERED,
}
# What other kits switch off with false, and this kit does unless another setting says so: false asks for something.
_FALSE_ASKS = set(
    """
    group_by_length assistant_only_loss completion_only_loss train_on_responses_only shuffle_dataset
    shuffle_merged_datasets shuffle_data data_shuffle resume auto_resume_from_checkpoints save_safetensors
    double_quantization use_bnb_nested_quant enable_thinking preserve_thinking use_fast_tokenizer tokenizer_use_fast
    lora_target_linear bf16 bfloat16 gradient_as_bucket_view ddp_broadcast_buffers average_tokens_across_devices
    greater_is_better strict use_reentrant remove_unused_columns disable_dropout
    """.split()
)
_LEFT_OUT = "leave it out: it is off without it"
# What the values of these mean here.
_CHOOSE_OBJECTIVE = "stage trainer task training_objective rl loss_type pref_loss dpo_loss_type".split()
_OBJECTIVES = {
    **{name: f"use objective: {name}" for name in ("sft", "dft", "eaft", "dpo", "orpo", "simpo", "cpo", "kto")},
    **{
        name: f"use objective: dpo, with dpo_loss: {name}"
        for name in ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm")
    },
    "dpo_norm": "use objective: dpo, with dpo_loss: sigmoid_norm",
    "kto_pair": "use objective: dpo; kto takes rows of one answer and a label",
    **dict.fromkeys(("nll", "chunked_nll"), "use objective: sft, the default"),
    **dict.fromkeys(("pt", "pretrain", "pretraining"), "use train_on: all, for text"),
    **dict.fromkeys(_OTHER_TRAINING, REWARDS),
    **dict.fromkeys(
        """
        exo_pair nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down apo_zero_unpaired discopop alphapo
        """.split(),
        _DPO_VARIANT,
    ),
}


def is_other_kits_word(name: str) -> bool:
    """Return whether another kit has a setting ``name``, and this kit has none."""
    return bool(_answer(name))


def other_kits_word(name: str, value: Any = True) -> str:
    """Return what to use instead of the setting ``name`` of another kit; empty if no kit known here has it.

    Args:
        value: what the user gave it, as YAML or the command line has it.
    """
    answer, text = _answer(name), str(value).strip().lower()
    if not answer:
        return answer
    if text in ("", "none", "null", "~", "[]", "{}"):
        return "leave it out: it has no value"
    if text in ("false", "no", "off") and name not in _FALSE_ASKS:
        return _LEFT_OUT
    if name == "special_tokens" and set(re.findall(r"(\w+)'?\"?:", text)) == {"pad_token"}:
        return "leave it out: padding is never learned from"
    if name in ("assistant_only_loss", "completion_only_loss", "train_on_responses_only") and text == "false":
        return "use train_on: all"
    if name in ("bf16", "bfloat16") and text == "full":
        return _PURE_BF16
    if name in _CHOOSE_OBJECTIVE and text in _OBJECTIVES:
        return _OBJECTIVES[text]
    if name in ("stage", "trainer", "task") and text != "true":
        return REWARDS
    if answer.startswith("not offered") and text.strip("0.") == "":
        return _LEFT_OUT
    return answer + (f"; {GGUF}" if text.endswith(".gguf") else "")


def objective_of_other_kits(value: str) -> str:
    """Return what to use instead of an objective or a loss ``value`` of another kit; empty if no kit here has it."""
    return _OBJECTIVES.get(value.strip().lower(), "")


def _answer(name: str) -> str:
    if name in OTHER_KITS:
        return OTHER_KITS[name]
    return next((answer for start, answer in _FAMILIES.items() if name == start or name.startswith(f"{start}_")), "")
