"""What becomes of the keys that no other module here reads, by the words of ``kit.config.other_kits``."""

import re

from kit.config import other_kits
from kit.config.other_kits import other_kits_word
from kit.config.recipe import Recipe
from kit.tools.convert.draft import Draft, Group, is_false, is_nothing, is_true

# Words whose answer names another way to do something here, which a converted file does not need.
_REASONS = {
    Group.SPEED: {
        "the base stays in bf16: more memory; with adapters, --method qlora takes less": "load_in_8bit",
        "the base stays in bf16: more memory": "quantize_moe_experts",
        "auto takes the kernel that the model and packing can": """
            attn_implementation flash_attn flash_attention flash_attention_2 use_flash_attn use_flash_attention_2
            sdp_attention xformers_attention flex_attention eager_attention ring_attn_func attn_impl
            experts_implementation gptq_disable_exllama""",
        "the default mode of inductor is taken": """
            torch_compile_mode torch_compile_backend torch_compile_options""",
        "micro-batches hold samples of similar length, so there is little padding": "padding_free dpo_padding_free",
    },
    Group.NEEDLESS: {
        "a run continues where it was interrupted, in an output_dir of its own": """
            resume_from_checkpoint overwrite_output_dir""",
        "a silent rank ends the run after ddp_timeout, 1800 seconds": "ddp_timeout",
        "it is about generating": "max_new_tokens predict_with_generate",
    },
}
_REASON_OF = {
    word: (group, reason)
    for group, reasons in _REASONS.items()
    for reason, words in reasons.items()
    for word in words.split()
}
# Words of other kits whose setting here is named in a hint, and whose value says another thing.
_OTHER_VALUE = frozenset(
    """
    lora_target_parameters target_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters_regex
    freeze_trainable_modules freeze_trainable_layers freeze_extra_modules disable_shuffling
    disable_gradient_checkpointing special_tokens added_tokens_overrides new_special_tokens_config fix_untrained_tokens
    truncation truncation_side conversation prompt_style data_dir dataset_dir data_files dataset_splits packing_length
    column_mapping message_property_mappings early_stopping early_stopping_steps max_steps_per_epoch
    """.split()
)
_SPEED = (other_kits.KERNELS, other_kits.OFFLOADING, other_kits.FP8, other_kits.ONE_LOOP)
# How answers begin to words that ask for nothing that this kit does not do anyway, or that is not part of training.
_NEEDLESS = (
    "leave it out",
    "always",
    "not needed",
    "a key of",
    "it is NCCL",
    "it is wandb's",
    "ranks come",
    "the devices",
    "the hub's",
    "the tokenizer is",
    "use chat_template_kwargs",
    "tokenised data",
    "use push_to_hub",
    "not a setting of a run",
    "a run generates",
    "trackio's",
    "not offered: clearml",
    "`kit prepare`",
    "lm_eval opens",
    "it belongs in the Accelerate config",
    "strategy comes",
    "precision comes",
    "torch's variables show",
    "use loss_spike_ratio",
    "use profile_steps",
    "use num_processes",
    "use dataset_num_proc",
    "use predict_with_generate",
    "use max_new_tokens",
    "use report_to",
    "use resume_from_checkpoint",
    "use run_name",
    "use project",
    "text only",
    "use packing: best fit",
    "use logging_steps: 1",
    "use output_dir",
    "use per_device_eval_batch_size: a reference",
    "use method: qlora; its 4-bit",
)


def take_rest(draft: Draft) -> None:
    """Read all keys of ``draft`` that are left."""
    offload = draft.take_first("activation_offloading", "enable_activation_offloading")
    if offload is not None and not is_false(offload):
        if draft.values.get("gradient_checkpointing"):
            draft.put("activation_offload", True, "of the inputs of layers")
        else:
            draft.drop("activation_offloading", offload, Group.SPEED, "without gradient_checkpointing all is kept")
    pushes = draft.take("push_to_hub")
    if is_true(pushes) and re.fullmatch(r"[^/\s]+/[^/\s]+", str(draft.given.get("hub_model_id"))):
        draft.put("push_to_hub", draft.take("hub_model_id"), "private")
    elif not is_nothing(pushes) and not is_false(pushes):
        draft.drop("push_to_hub", pushes, Group.NEEDLESS, f"it has no name OWNER/NAME; {other_kits.UPLOAD}")
    for key in list(draft.given):
        value = draft.given.pop(key)
        if is_nothing(value):
            continue
        if key in _REASON_OF:
            if not is_false(value):
                draft.drop(key, value, *_REASON_OF[key])
        elif key in Recipe.model_fields:
            draft.put(key, value)
        else:
            _take_word(draft, key, value)


def _take_word(draft: Draft, key: str, value: object) -> None:
    answer = other_kits_word(key, value)
    if answer.startswith(("leave it out: it has no value", "leave it out: it is off")):
        return
    same = re.fullmatch(r"use (?:--)?(\w+)", answer)
    group = group_of(answer)
    if same and group is Group.LEARNS and same[1] not in draft.values and key not in _OTHER_VALUE:
        draft.put(same[1], value)
        draft.sources[same[1]] = key
    elif not (is_false(value) and not answer):  # a switch that is off
        if group is Group.NEEDLESS:
            answer = re.sub(r"^use (--)?", "here it is ", answer)
        draft.drop(key, value, group, answer or "not known here")


def group_of(answer: str) -> Group:
    """Return what it changes to leave out a word with this answer of ``other_kits_word``."""
    if answer in _SPEED or answer.endswith(other_kits.PARALLEL):
        return Group.SPEED
    return Group.NEEDLESS if answer.startswith(_NEEDLESS) else Group.LEARNS
