"""More names of settings in other kits: what has no counterpart here, by subject, with the reason.

They were read in the sources of axolotl 0.18.0 (067b021), LLaMA-Factory 0.9.6.dev0 (ff6d4d1), TRL 1.10.0.dev0
(f2cd577) and ms-swift (3602360), and in their examples. Without an answer, some
would get that of a setting here with a similar name.
"""

REWARDS = (
    "not offered: nothing learns from rewards, or from answers that the model generates; objective lists what does"
)
DISTILLATION = "not offered: nothing is learned from the probabilities of another model"
ADAPTERS = "give the kind of peft as adapter_type, and its options as adapter_options"
_CHANGES_BASE = (
    "changes the base too, so its adapter is none of the model that it began with; make both with peft, and give them "
    "as model_name_or_path and adapter_name_or_path: docs/models.md#initial-values-that-change-the-base"
)
_NEEDS_DATA = "not offered: needs passes over data before the adapters exist; use --init_lora_weights default"
# What peft knows and this kit does not, with the reason.
INITIALISATIONS = {
    "pissa": f"not offered: {_CHANGES_BASE}",
    "olora": f"not offered: {_CHANGES_BASE}",
    "mica": "not offered: only a part of its adapter trains; use --init_lora_weights default",
    "corda": _NEEDS_DATA,
    "eva": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
    "loftq": "not offered: peft's needs a CUDA device and scipy, and a 4-bit base of its own; use --method qlora",
}
KERNELS = "not offered: layers run as transformers has them; the loss is computed in chunks, without all logits at once"
OPTIMISERS = "not offered: optim lists the optimisers; adamw_8bit takes the least memory"
OFFLOADING = "not offered: use gradient_checkpointing, or --config fsdp_offload"
ONE_LOOP = "not offered: one loop, on Accelerate"
GENERATE = "a run generates only for predict_with_generate; other programs open final/"
VISION = "text only: towers for images and sound stay as they are (docs/models.md)"
LOADING = "leave it out: another way of loading, which is not used here"
ROWS = "not offered: docs/data.md has the formats and columns that are read"
SERVICE = "leave it out: it is for a service that starts runs"
OWN_CODE = (
    "not offered: code of other kits is not run; docs/data.md and docs/models.md have the data and models that are read"
)
WEIGHTS = "leave it out: weights are read from model_name_or_path, and written as safetensors"
OWN_QUANTISATION = "not offered: a base is in bf16, or with --method qlora in 4 bits"

WORDS = {
    REWARDS: """
        num_generations num_iterations num_ppo_epochs num_mini_batches num_sample_generations
        steps_per_generation reward_funcs reward_weights reward_model reward_adapters
        multi_turn_scheduler max_turns rollout sampler_engine sampler_type
        num_sampling_batch_size epsilon_high cliprange cliprange_value vf_coef kl_coef lam lmbda
        whiten_rewards missing_eos_penalty response_length
        importance_sampling_level dynamic_sample overlong_filter log_completions
        local_rollout_forward_batch_size
        prm_model prm_threshold orm_model advantage_estimator gym_env use_gym_env ppo_epochs
        center_rewards_coefficient process_reward_model n_samples_per_prompt generate_max_len
        ce_coef alignment_coef diversity_coef feature_layers embed_method""",
    DISTILLATION: """
        teacher teacher_model teacher_adapters teacher_model_type teacher_model_revision
        teacher_deepspeed teacher_model_server teacher_kl_coef offload_teacher_model kd_loss seq_kd
        gkd_logits_topk logprobs_field top_logprobs""",
    ADAPTERS: """
        adalora_init_r adalora_target_r adalora_beta1 adalora_beta2 adalora_tinit adalora_tfinal
        adalora_orth_reg_weight adapter_act adapter_length boft_dropout boft_block_size boft_block_num
        boft_n_butterfly_factor fourier_n_frequency fourier_scaling reft_args reft_rank reft_layers reft_layer_key
        reft_intervention_type llamapro_num_new_blocks llamapro_num_groups lora_ga_batch_size lora_ga_iters
        lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma lora_dtype
        use_swift_lora target_regex lisa_activated_layers lisa_n_layers lisa_step_interval lisa_layers_attribute
        jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps vit_lr aligner_lr
        embedding_lr_scale peft_layer_replication peft_autocast_adapter_dtype""",
    OPTIMISERS: "optim_config lr_div_factor",
    KERNELS: """
        flash_optimum flex_attn_compile_kwargs gemma4_hybrid_attn_impl use_dsv4_kernels use_glm_dsa_kernels
        dsv4_fp4_grouped_mode pretrain_multipack_attn expert_parallel_num_nvl_bytes expert_parallel_token_capacity
        expert_parallel_backend llama4_linearized_experts heads_k_stride experts_impl attention_backend
        cross_entropy_fusion_impl
        sdpa_varlen large_head_attention cross_entropy_loss_fusion gradient_accumulation_fusion apply_rope_fusion
        bias_activation_fusion moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap moe_token_dispatcher_type
        chunked_cross_entropy_num_chunks tiled_mlp_num_shards tiled_mlp_use_original_mlp use_logits_to_keep
        dpo_use_logits_to_keep""",
    OFFLOADING: """
        offload_params offload_model offload_optimizer optimizer_cpu_offload
        optimizer_offload_fraction""",
    ONE_LOOP: """
        recompute_granularity recompute_method recompute_num_layers train_iters no_save_optim no_save_rng finetune
        overlap_grad_reduce overlap_param_gather use_distributed_optimizer cp_mode recompute_modules
        linear_decoupled_in_proj decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        expert_tensor_parallel_size""",
    GENERATE: """
        generation_max_new_tokens gradio_max_new_tokens gradio_temperature gradio_title gradio_share
        gradio_server_name gradio_server_port num_generation_samples generation_do_sample generation_temperature
        generation_top_k generation_top_p generation_prompt_ratio repetition_penalty length_penalty stop_words
        sample_backend skip_special_tokens eval_limit eval_generation_config
        extra_eval_args eval_dataset_args bench_dataset bench_split prompt""",
    "lm_eval opens final/ itself: docs/after-training.md": """
        tasks eval_tasks eval_use_evalscope do_bench_eval num_fewshot""",
    VISION: """
        freeze_vit freeze_aligner vit_gradient_checkpointing max_pixels norm_bbox use_audio_in_video crop_to_patches
        collate_fn""",
    "not offered: the text model is what trains": "freeze_llm",
    LOADING: """
        experimental_skip_move_to_device torchdistx_path max_memory gpu_memory_limit sample_packing_eff_est
        total_num_tokens base_model_ignore_patterns
        sample_packing_bin_size sample_packing_group_size
        sample_packing_mp_start_method sample_packing_seq_len_multiplier lazy_tokenize load_from_cache_file
        download_mode use_hf init_strategy init_special_tokens check_model packing_num_proc is_preprocess
        preprocess_shards num_dataset_shards_to_save template_backend tuner_backend
        qlora_sharded_model_loading multipack_real_batches use_orig_params load_args
        ignore_args_error add_version disable_auto_column_mapping acc_strategy dynamic_checkpoint ignore_bias_buffers
        override_exist_file pretrain_multipack_buffer_size""",
    SERVICE: """
        cloud provider gpu node_count volumes secrets branch dockerfile_commands memory timeout memory_preprocess
        timeout_preprocess use_ray ray_num_workers ray_run_name ray_storage_path resources_per_worker ray_init_kwargs
        device_groups colocate_groups ENV""",
    OWN_CODE: "custom_register_path external_plugins",
    WEIGHTS: """
        safe_serialization max_shard_size create_checkpoint_symlink tokenizer_save_jinja_files
        local_repo_path ms_hub_token om_hub_token use_flash_ckpt""",
    OWN_QUANTISATION: """
        model_quantization_config model_quantization_config_kwargs quantize_embedding hqq_axis weight_dtype
        activation_dtype fake_quant_after_n_steps group_size quantization_device_map gptq_groupsize gptq_model_v1""",
    "not offered: qlora leaves experts that are one tensor in 16 bits": "quantize_moe_experts",
    "use --method qlora": "quant_bits quant_method",
    "not offered: samples stay as they are": """
        min_sample_len shuffle_before_merging_datasets curriculum_sampling sample_packing_sequentially batching_strategy
        batch_flattening pretraining_sample_concatenation use_pose pose_max_context_len pose_num_chunks
        pose_split_on_token_ids scaling_softmax scaling_softmax_factor
        scaling_softmax_bias drop_system_message split_thinking diffusion enable_channel_loss""",
    ROWS: """
        apply_chat_template agent_template use_chat_template custom_dataset_info cached_dataset cached_val_dataset field
        field_prompt field_system field_completion field_label field_human field_model prompt_format
        chosen_format rejected_format completion_format input_format input_transform message_field_role
        message_field_content message_field_training message_field_training_detail response_prefix
        shards shards_idx dataset_shard_idx dataset_shard_num interleave_prob stopping_strategy""",
    "leave it out: a message of the assistant may have reasoning_content, or thinking": """
        field_thinking template_thinking_key add_non_thinking_prefix disable_ignore_empty_think""",
    "leave it out: tool definitions are read from the column tools": "field_tools",
    "use train_on: last, or leave it out": "loss_scale is_binary_loss_scale",
    "a data set in a list has `replace`, for texts in its rows such as {{AUTHOR}}": "model_author",
    "use objective: dft": "enable_dft_loss",
    "use cpo_alpha": "sft_alpha",
    "use label_smoothing_factor": "label_smoothing_ratio",
    "use adapter_name_or_path": "adapters",
    "use model_name_or_path": "base_model_path",
    "use lora_target_modules, or train_only": "trainable_parameters_regex",
    "use freeze": "freeze_parameters_regex freeze_parameters_ratio",
    "use eval_split_size": "split_dataset_ratio test_split_size",
    "use dataset_split": "dataset_splits",
    "use shuffle": "dataset_shuffle train_dataloader_shuffle",
    "leave it out: evaluation data are read in their order": "val_dataset_shuffle eval_on_each_dataset",
    "use excess_length_strategy": "truncation_strategy",
    "use max_length": "packing_length max_model_len max_prompt_len",
    "use new_tokens": "new_special_tokens",
    "use trainable_tokens": "fix_untrained_tokens peft_trainable_token_indices",
    "use router_aux_loss_coef": "moe_aux_loss_coeff",
    "use warmup_steps: below 1 it is a share of all steps": "lr_warmup_fraction",
    "use early_stopping_patience": "early_stop_interval",
    "use metric_for_best_model": "eval_metric",
    "use gradient_checkpointing: selective": "recompute_layer_types",
    "use resume_from_checkpoint": "resume_only_model",
    "use method: lora": "peft_config",
    "use report_to": "use_trackio",
    "use run_name": "exp_name",
    "use profile_steps, which begins after the first two steps": """
        enable_torch_profiler""",
    "causal language models only: they have no labels or classes": "cls_model_config type_of_model",
}
