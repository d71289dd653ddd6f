"""What users of other kits type is answered with what it is called here."""

import dataclasses
import re

import pytest
from config_helpers import problems
from helpers import ROOT

from kit.config.other_kits import OTHER_KITS, is_other_kits_word, other_kits_word
from kit.config.validation import FLAGS


def test_words_of_other_kits_are_no_settings_here_and_point_at_settings_that_exist():
    assert not [flag for flag in FLAGS if is_other_kits_word(flag)]
    for word, answer in OTHER_KITS.items():
        for used in re.findall(r"\buse (?:--)?(\w+)", answer):
            assert used in FLAGS, (word, used)


def test_each_training_argument_of_transformers_is_a_flag_or_is_answered():
    """A new version of transformers that brings a field fails here until the field has an answer."""
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert [name for name in names if name not in FLAGS and not is_other_kits_word(name)] == []


# Some words had the answer of a setting with a similar name.
GUESSED = """
    dataset_val train_dataset use_dft_loss max_epochs lora_model_dir truncation_strategy teacher_model
    split_dataset_ratio boft_dropout num_iterations lora_ga_scale init_weights freeze_vit cached_dataset
    stopping_strategy use_pose seq_kd dataset_shuffle moe_aux_loss_coeff early_stop_interval
    use_distributed_optimizer
""".split()


# The 40 most frequent keys of the examples of axolotl and LLaMA-Factory that are no settings here, and what was asked.
FREQUENT = """
    saves_per_epoch wandb_name wandb_log_model wandb_watch wandb_entity wandb_project evals_per_epoch special_tokens
    lora_model_dir plugins lora_target_linear model_type tokenizer_type pad_to_sequence_len
    eval_sample_packing strict liger_rms_norm eot_tokens lora_mlp_kernel loss_watchdog_threshold activation_offloading
    stage do_train plot_loss dataloader_num_workers overwrite_cache model_class train_dataset kernel_config
    image_max_pixels quant_config debug use_v1_kernels export_dir quantization_bit pure_bf16 freeze_vision_tower
    galore_rank apollo_rank max_epochs dataset_val use_dft_loss num_labels hub_token torch_compile_mode
""".split()


@pytest.mark.parametrize("word", FREQUENT + GUESSED)
def test_a_known_word_is_never_answered_with_a_guess_by_spelling(word):
    answer = problems([f"--{word}", "1"])[f"--{word}"]
    assert "-> " in answer and "did you mean" not in answer and "unknown flag" not in answer


@pytest.mark.parametrize(
    ("word", "value", "answer"),
    [
        ("load_in_4bit", "true", "use --method qlora"),
        ("bf16", "full", "use optim: adamw_bf16"),
        ("pure_bf16", "true", "lose each update below 2^-9 of a weight; use optim: adamw_bf16"),
        ("pure_bf16", "false", "leave it out"),
        ("load_in_4bit", "false", "leave it out"),
        ("train_on_inputs", "False", "leave it out"),
        ("wandb_project", "", "leave it out: it has no value"),
        ("neft_alpha", "null", "leave it out: it has no value"),
        ("assistant_only_loss", "false", "use train_on: all"),
        ("group_by_length", "false", "always on"),
        ("warmup_ratio", "0", "use warmup_steps"),
        ("stage", "sft", "use objective: sft"),
        ("stage", "dpo", "use objective: dpo"),
        ("stage", "kto", "use objective: kto"),
        ("stage", "rm", "nothing learns from rewards"),
        ("stage", "pt", "use train_on: all"),
        ("rl", "orpo", "use objective: orpo"),
        ("rl", "ipo", "use objective: dpo, with dpo_loss: ipo"),
        ("rl", "grpo", "nothing learns from rewards"),
        ("pref_loss", "simpo", "use objective: simpo"),
        ("pref_loss", "hinge", "use objective: dpo, with dpo_loss: hinge"),
        ("loss_type", "dft", "use objective: dft"),
        ("loss_type", "nll", "use objective: sft"),
        ("loss_type", "apo_zero", "use dpo_loss, which lists"),
        ("loss_type", "[sigmoid, sft]", "dpo_loss lists the losses"),
        ("dpo_loss_type", "dpo_norm", "dpo_loss: sigmoid_norm"),
        ("precompute_ref_log_probs", "false", "leave it out"),
        ("loss_weights", "0", "leave it out"),
        ("disable_dropout", "false", "use lora_dropout"),
        ("loss", "mine.Loss", "the loss is code"),
        ("special_tokens", "{pad_token: <pad>}", "padding is never learned from"),
        ("special_tokens", "{pad_token: <pad>, eos_token: <end>}", "use new_tokens"),
        ("quantize_moe_experts", "true", "leaves experts that are one tensor in 16 bits"),
        ("use_muon", "false", "leave it out"),
    ],
)
def test_a_value_that_asks_for_nothing_is_no_request(recipe_file, word, value, answer):
    assert answer in problems(recipe_file(f"{word}: {value}"))[f"mine.yaml:3 {word}"]
    assert answer in other_kits_word(word, value)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("gradient_accumulation_steps", "global_batch_size"),
        ("load_in_4bit", "--method qlora"),
        ("bf16", "mixed_precision: bf16"),
        ("fp16", "accelerate launch --mixed_precision no"),
        ("max_seq_length", "max_length"),
        ("deepspeed", "--config fsdp"),
        ("tensor_parallel_size", "docs/parallelism.md"),
        ("tp_size", "docs/parallelism.md"),
        ("sequence_parallel", "docs/parallelism.md"),
        ("zero_stage", "--config fsdp"),
        ("machine_rank", "docs/multi-node.md"),
        ("main_process_ip", "docs/multi-node.md"),
        ("custom_loss", "docs/architecture.md#an-objective-or-another-loss"),
        ("flash_attn", "--attn_implementation"),
        ("device", "use_cpu in the Accelerate config"),
        ("dp_replicate_size", "--config fsdp_hybrid"),
        ("ddp_find_unused_parameters", "refused by name"),
        ("bucket_cap_mb", "ddp_bucket_cap_mb"),
        ("ddp_comm_hook", "float32"),
        ("load_best_model_at_end", "use keep_best"),
        ("greater_is_better", "knows whether greater is better"),
        ("torch_compile_backend", "use torch_compile: layers"),
        ("noisy_embedding_alpha", "use neftune_noise_alpha"),
        ("use_eaft", "use objective: eaft"),
        ("hub_model_id", "kit push"),
        ("hub_token", "hf auth login"),
        ("num_labels", "no labels or classes"),
        ("use_liger_kernel", "computed in chunks"),
        ("lora_model_dir", "use adapter_name_or_path"),
        ("train_dataset", "use dataset"),
        ("dataset_val", "use eval_dataset"),
        ("max_epochs", "use num_train_epochs"),
        ("use_dft_loss", "use objective: dft"),
        ("dpo", "use objective: dpo"),
        ("rl", "nothing learns from rewards"),
        ("rl_beta", "use beta"),
        ("pref_beta", "use beta"),
        ("dpo_beta", "use beta"),
        ("orpo_alpha", "use beta"),
        ("gamma", "use simpo_gamma"),
        ("gamma_beta_ratio", "use simpo_gamma: this ratio times beta"),
        ("dpo_label_smoothing", "use label_smoothing"),
        ("kto_desirable_weight", "use desirable_weight"),
        ("kto_rejected_weight", "use undesirable_weight"),
        ("precompute_ref_log_probs", "use precompute_reference"),
        ("ref_model", "the model as it was at the start"),
        ("ref_checkpointer", "the model as it was at the start"),
        ("reference_model", "the model as it was at the start"),
        ("reference_free", "which have no reference"),
        ("max_prompt_length", "use max_length"),
        ("pref_ftx", "use objective: orpo, or cpo"),
        ("f_divergence_type", "use dpo_loss"),
        ("generate_during_eval", "use predict_with_generate"),
        ("reward_model", "nothing learns from rewards"),
    ],
)
def test_words_of_other_kits_are_answered(recipe_file, word, answer):
    assert answer in problems([f"--{word}", "1"])[f"--{word}"]
    assert answer in problems(recipe_file(f"{word}: 1"))[f"mine.yaml:3 {word}"]


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--objective", "ipo"], "use objective: dpo, with dpo_loss: ipo"),
        (["--objective", "grpo"], "nothing learns from rewards"),
        (["--objective", "DPO"], "use objective: dpo"),
        (["--objective", "dop"], "did you mean 'dpo'"),
        (["--objective", "lora"], "--method lora instead of --objective"),
        (["--method", "dpo"], "--objective dpo instead of --method"),
        (["--dpo_loss", "simpo"], "--objective simpo instead of --dpo_loss"),
        (["--dpo_loss", "dpo_norm"], "dpo_loss: sigmoid_norm"),
        (["--dpo_loss", "sigmod"], "did you mean 'sigmoid'"),
        (["--dpo_los", "ipo"], "did you mean 'dpo_loss'"),
        (["--simpo_gama", "1"], "did you mean 'simpo_gamma'"),
    ],
)
def test_an_objective_or_loss_that_is_called_otherwise_here_is_no_slip_of_the_finger(flags, answer):
    assert answer in problems(flags)[flags[0]]


def test_every_preference_setting_of_trl_is_a_flag_or_is_answered():
    """The fields that TRL 1.16 adds to those of transformers, for the objectives that this kit has too."""
    added = """
        model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc max_length
        padding_free truncation_mode pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size
        loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta
        use_weighting discopop_tau pad_token activation_offloading sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps train_sampling_strategy desirable_weight undesirable_weight max_completion_length
        padding_value generate_during_eval is_encoder_decoder cpo_alpha simpo_gamma
    """.split()
    assert [name for name in added if name not in FLAGS and not is_other_kits_word(name)] == []


def test_answers_point_at_pages_and_headings_that_exist():
    for word, answer in OTHER_KITS.items():
        for page, anchor in re.findall(r"(docs/[\w-]+\.md)(?:#([\w-]+))?", answer):
            headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, (word, anchor)
