"""Recognises the configuration files of other kits by their keys. Plain Python.

Promises: a recipe of this kit with a few words of another one is still a recipe, so its problems are named one by one.
"""

from collections.abc import Collection, Mapping
from typing import Any

# Keys that only files of these kits have. TRL's are those of its script arguments and of transformers' Trainer, which
# LLaMA-Factory and ms-swift share: of kits with as many hits, the first is taken.
KITS = {
    "axolotl": """
        base_model micro_batch_size sequence_len val_set_size sample_packing evals_per_epoch saves_per_epoch adapter
        lora_target_linear wandb_entity wandb_watch wandb_log_model dataset_prepared_path pad_to_sequence_len num_epochs
        train_on_inputs lora_model_dir special_tokens optimizer lr_scheduler datasets test_datasets pretraining_dataset
        rl flash_attention eval_sample_packing eot_tokens base_model_config tokenizer_type plugins""",
    "LLaMA-Factory": """
        stage finetuning_type cutoff_len lora_target lora_rank plot_loss quantization_bit dataset_dir val_size
        preprocessing_num_workers overwrite_cache pref_beta pref_loss neat_packing template mask_history
        infer_backend export_dir max_samples image_max_pixels tokenized_path""",
    "LLaMA-Factory v1": """
        model_class dist_config kernel_config peft_config train_dataset sample_backend quant_config init_config
        batching_strategy optim_config""",
    "ms-swift": """
        train_type tuner_type target_modules split_dataset_ratio dataset_shuffle val_dataset rlhf_type quant_method
        lazy_tokenize load_from_cache_file template model_author model_name custom_register_path external_plugins
        freeze_vit freeze_llm padding_free sequence_parallel_size torch_dtype loss_scale truncation_strategy
        target_regex init_weights lorap_lr_ratio""",
    "TRL": """
        dataset_mixture dataset_mixer dataset_name dataset_train_split dataset_test_split max_seq_length torch_dtype
        use_peft gradient_accumulation_steps hub_model_id push_to_hub do_eval eval_steps warmup_ratio
        assistant_only_loss completion_only_loss dataset_text_field loss_type max_prompt_length""",
}
_WORDS = {kit: frozenset(words.split()) for kit, words in KITS.items()}


def kit_of(values: Mapping[str, Any], ours: Collection[str], is_sure: bool = False) -> str:
    """Return the kit whose file has these keys; empty if it is none of a known kit.

    Args:
        values: of the file, not flattened.
        ours: names of this kit's settings, which say nothing.
        is_sure: whether a few keys of another kit are not enough, because a recipe of ours may have them by mistake.
    """
    if {"tuner_type", "model"} <= set(values):
        return "ms-swift"
    if {"dataset_mixture", "dataset_mixer"} & set(values):
        return "TRL"
    given = set(values) - set(ours)
    hits = {kit: len(given & words) for kit, words in _WORDS.items()}
    best = max(hits, key=lambda kit: hits[kit])
    least = 1
    if is_sure:
        least = 3 if "dataset" not in values or best != "TRL" else len(values)
    return best if hits[best] >= least else ""
