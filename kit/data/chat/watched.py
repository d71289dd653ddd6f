"""Names of columns and keys of messages, besides those that are read, that may change what is learned. Pure.

The names are those of public data sets, of other kits and of APIs. What a value under such a name would change, and
whether it would, is decided in ``kit.data.chat.unused``.
"""

import re
from functools import cache

from kit.data.chat.messages import REASONING

# The keys of a message that ``kit.data.chat.messages`` reads.
MESSAGE_KEYS = frozenset(
    ("role content from value name tool_calls tool_call_id function_call train weight " + " ".join(REASONING)).split()
)
# Columns in which a value may change what is learned, by what they are about.
_COLUMNS = {
    "media": "image images video videos audio audios pixel_values attachments",
    "link": """image_url image_urls image_path image_paths image_file image_files video_url video_urls video_path
        video_paths video_file video_files audio_url audio_urls audio_path audio_paths audio_file audio_files""",
    "train": "train training trainable trained_on learn",
    "weight": "weight loss_weight sample_weight example_weight importance_weight loss_scale loss_multiplier",
    "mask": """mask attention_mask loss_mask token_loss_mask completion_mask response_mask prompt_mask assistant_mask
        assistant_masks action_mask target_mask label_mask labels_mask token_mask train_mask""",
    "labels": "labels",
    "label": "label kto_tag",
    "message": "role parent_id",
    "history": "history chat_history conversation_history",
    "system": "system system_prompt system_message",
    "tools": "tools functions available_tools tool_definitions function_definitions",
    "documents": "documents",
    "calls": "tool_calls function_calls",
    "reasoning": "reasoning_content",
    "variable": """enable_thinking thinking thinking_budget reasoning_effort reasoning_mode preserve_thinking
        clear_thinking keep_past_thinking model_identity builtin_tools custom_tools custom_instructions date_string
        controls response_format""",
    "more": "input context",
    "positions": "position_ids",
    "lengths": "seq_lengths seq_lens sequence_lengths seq_start_id",
    "borders": "cu_seqlens",
    "numbers": "segment_ids sequence_ids document_ids seq_idx",
}
SUBJECTS = {name: subject for subject, names in _COLUMNS.items() for name in names.split()}
# Keys of messages in which a value may change what is learned, as patterns of words in lower case.
_KEYS = {
    "learned": r"((is|step|token|compute|has)_)?(loss|train|training|trainable|trained|learn|supervised)"
    r"|((step|token)_)?(loss|token|sample|train)_(mask|scale|weight|multiplier)s?|train_on(_turn)?|weight",
    "masked": r"(is_)?(masked|mask|ignored?|frozen)|(ignore|no|skip|mask|exclude_from)_(loss|train|training)",
    "detail": r"(reasoning_)?train(ing)?_detail",
    "label": r"label|kto_tag",
    "media": r"(image|video|audio|media|picture|photo|file|attachment)s?(_(url|path|file|data|id)s?)?"
    r"|pixel_values|input_audio",
    "reasoning": r"((inner|internal|hidden|chain_of)_)?"
    r"(reasoning|thinking|think|thoughts?|cot|rationale|scratchpad|monologue)"
    r"(_(content|details?|text|traces?|blocks?|steps?|process|summary|items?|parts?))*|tool_plan",
    "call": r"(tool|function)_?(call|use|invocation|response|result|output)s?",
    "call_id": r"call_id|tool_use_id|tool_callid|tool_call_ids?",
    "tool_name": r"tool_name|function_name",
    "channel": r"channel",
    "recipient": r"recipient",
    "kwargs": r"additional_kwargs",
}
_PATTERNS = {subject: re.compile(pattern) for subject, pattern in _KEYS.items()}


def is_watched(column: str) -> bool:
    """Whether a value in a column that is not read may change what is learned."""
    return column in SUBJECTS


@cache
def subject_of_key(key: str) -> str:
    """What a key of a message that is not read is about; empty for most."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_")
    return next((subject for subject, pattern in _PATTERNS.items() if pattern.fullmatch(words)), "")
