"""Names that other kits, APIs and public data sets use are recognised, and names that only look like them are not."""

import pytest

from kit.data.chat.watched import is_watched, subject_of_key

KEYS = {
    "learned": "loss training trainable is_trainable loss_mask step_loss_mask token_loss_mask loss_weight loss_scale",
    "masked": "masked is_masked mask ignore ignore_loss no_loss skip_training exclude_from_loss",
    "detail": "train_detail training_detail reasoning_training_detail",
    "media": "image images image_url imageUrl image_urls video audio_path attachments files file_ids pixel_values",
    "reasoning": "thought thoughts cot think chain_of_thought reasoning_details reasoning_text thinking_blocks"
    " rationale reasoning_summary inner_thoughts thought_process reasoningContent scratchpad tool_plan",
    "call": "tool_call toolCalls tool_use function_calls functionCall tool_responses tool_results",
    "call_id": "call_id tool_use_id toolCallId",
    "": "id model name_of_user timestamp stop_reason finish_reason reasoning_tokens reasoning_effort thinking_budget"
    " lossless trainer masking_strategy profile filename images_count language toxic cache_control refusal usage",
}


@pytest.mark.parametrize(("subject", "names"), KEYS.items())
def test_a_key_of_a_message_is_known_by_what_it_is_about(subject, names):
    assert {name: subject_of_key(name) for name in names.split()} == dict.fromkeys(names.split(), subject)


def test_columns_of_which_a_value_may_change_what_is_learned_are_read_from_tables_too():
    watched = (
        "images train label loss_mask response_mask documents labels attention_mask system tools history seq_lengths"
    )
    assert all(map(is_watched, watched.split()))
    assert not any(map(is_watched, "id source url score category license uuid split reasoning messages".split()))
