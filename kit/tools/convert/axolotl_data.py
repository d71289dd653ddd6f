"""The data sections of axolotl's YAML, and its chat templates.

Names of templates: those in ``TEMPLATES`` give the same text as ours for messages of system, user and assistant, which
was compared by rendering; those in ``TURNS`` are copies of what models bring, with what begins a turn
in each: the model's own template is looked up for it.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kit.durable import read_small
from kit.tools.convert.data import ALPACA, BARE, Data, put_data
from kit.tools.convert.draft import Draft, Group, as_list, is_nothing, is_true, number

TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "gemma3": "gemma", "gemma3n": "gemma", "phi_35": "phi3"}
_MISTRAL, _QWEN, _COHERE = "[INST]", "<|im_start|>", "<|START_OF_TURN_TOKEN|>"
TURNS = {
    "gemma": "<start_of_turn>",
    "gemma4": "<|turn>",
    "gemma4_unified": "<|turn>",
    **dict.fromkeys(("qwen_25", "qwen3", "qwen3_5", "qwen2_vl", "falcon_h1"), _QWEN),
    "llama4": "<|header_start|>",
    "llama3_2_vision": "<|start_header_id|>",
    "deepseek_v2": "User: ",
    "deepseek_v3": "<｜User｜>",
    "phi_3": "<|user|>",
    "phi_4": "<|im_sep|>",
    **dict.fromkeys(("cohere", "command_a", "aya"), _COHERE),
    **dict.fromkeys(("exaone", "exaone4"), "[|user|]"),
    **dict.fromkeys(("mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "pixtral"), _MISTRAL),
    "mistral_v7_tekken": "[SYSTEM_PROMPT]",
}
# Types of rows. Each is columns of theirs to our fields, where the names differ.
_TEXTS = ("completion", "pretrain")
_ALPACA = ("alpaca", "alpaca_chat", "alpaca_instruct")
_WORDINGS = {
    "alpaca": ALPACA,
    "alpaca:chat": "SYSTEM: " + ALPACA.partition("\n")[0] + "\nUSER: {instruction}[\n{input}]\nASSISTANT:",
}
# Of objectives over pairs: the type after the template's name, with the columns that it reads.
_PAIRS = {
    "ultra": {},
    "argilla": {},
    "icr": {"input": "instruction"},
    "intel": {"question": "instruction"},
    "prompt_pairs": {},
}
_OWN_FORMAT = "a format of axolotl's own, so --dataset FILE with its rows in another one"
_OWN_PAIRS = f"{_OWN_FORMAT}; docs/objectives.md has those of this kit"
_KNOWN = set(
    """
    path type name split revision data_files ds_type field text_column field_messages message_property_mappings
    message_field_role message_field_content field_chosen field_rejected roles roles_to_train train_on_eos train_on_eot
    field_tools field_thinking template_thinking_key chat_template chat_template_jinja trust_remote_code
    message_field_training conversation skip input_format field_prompt shards shards_idx
    """.split()
)
_ROLES = {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}, "system": {"system"}, "tool": {"tool"}}


def take_data(draft: Draft) -> None:
    """Read the data sets, the chat template and what is learned from."""
    sections = [entry for entry in _entries(draft.take("datasets")) if entry]
    streams = _entries(draft.take("pretraining_dataset"))
    tests = _entries(draft.take("test_datasets"))
    types = [_type_of(entry) for entry in sections] + ["pretrain"] * len(streams)
    _take_template(draft, sections, types)
    data = [_data_of(draft, f"datasets[{i}]", entry) for i, entry in enumerate(sections)]
    data += [
        _data_of(draft, f"pretraining_dataset[{i}]", entry | {"type": "pretrain"}) for i, entry in enumerate(streams)
    ]
    put_data(draft, "dataset", data)
    held_out = draft.take("val_set_size")
    if tests:
        put_data(draft, "eval_dataset", [_data_of(draft, f"test_datasets[{i}]", each) for i, each in enumerate(tests)])
    elif held_out is not None and number(held_out) > 0:
        draft.put("eval_split_size", held_out)
    if streams:
        draft.put("streaming", True, "pretraining_dataset is a stream")
        draft.put("packing", True, "as axolotl packs what it streams")
    draft.rename({"streaming_multipack_buffer_size": "shuffle_buffer_size"})
    if not draft.values.get("streaming"):
        draft.values.pop("shuffle_buffer_size", None)
    _take_lengths(draft, types)
    learns_inputs = is_true(draft.take("train_on_inputs"))
    if learns_inputs and "chat_template" not in types:
        draft.put("train_on", "all", "train_on_inputs")


def _entries(value: Any) -> list[dict[str, Any]]:
    if is_nothing(value):
        return []
    value = value if isinstance(value, list) else [value]
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in value]


def _type_of(entry: dict[str, Any]) -> str:
    kind = entry.get("type")
    if isinstance(kind, dict):
        return "user defined"
    name = str(kind or "").partition(":")[0].partition(".")[0]
    return "chat_template" if name == "sharegpt" else name


def _take_lengths(draft: Draft, types: list[str]) -> None:
    """What is done with samples that are longer than ``sequence_len``."""
    strategy = draft.take("excess_length_strategy", "drop")
    if types and all(kind in _TEXTS for kind in types):
        draft.put("excess_length_strategy", "split", "as axolotl divides long texts")
    else:
        draft.put("excess_length_strategy", "error" if strategy == "raise" else strategy, "the default of axolotl")
        if strategy != "drop":
            draft.notes.pop("excess_length_strategy")


def _take_template(draft: Draft, sections: list[dict[str, Any]], types: list[str]) -> None:
    """Set ``chat_template`` by name, from the file, or leave it to the model."""
    names = [draft.take("chat_template"), *(entry.get("chat_template") for entry in sections)]
    named = list(dict.fromkeys(str(name) for name in names if name is not None and name != "jinja"))
    jinja = draft.take("chat_template_jinja") or next(
        (entry["chat_template_jinja"] for entry in sections if entry.get("chat_template_jinja")), None
    )
    if any(kind in _ALPACA for kind in types):
        draft.template = BARE  # these rows are written without the model's template
    elif jinja is not None:
        if "\n" in str(jinja) or "{" in str(jinja):
            draft.template = str(jinja)
        else:
            draft.put("chat_template", jinja)
    elif named:
        put_template(draft, named[0].removeprefix("tokenizer_default_fallback_"), TEMPLATES, TURNS)
    own = {"alpaca" if kind in _ALPACA else "template" for kind in types if kind not in _TEXTS}
    if len(own) > 1:
        draft.drop("datasets.type", " and ".join(types), Group.LEARNS, "one chat template is for all data sets")


def put_template(draft: Draft, name: str, same: dict[str, str], turns: dict[str, str]) -> None:
    """Set our template of the same text, or leave it to the model if its own template begins turns in this way.

    Args:
        same: names there of templates that give the same text as one of ours.
        turns: names there of templates that models bring, with the text that begins a turn in each.
    """
    model = str(draft.typed.get("model_name_or_path", draft.values.get("model_name_or_path", "")))
    if name == "tokenizer_default":
        return
    if name in same:
        draft.put("chat_template", same[name])
        return
    own = template_here(model) if name in turns else None
    if own is not None and turns[name] in own:
        draft.drop("chat_template", name, Group.NEEDLESS, f"{model} brings a template with {turns[name]!r}")
        return
    reason = "no template here gives this text"
    if name in turns:
        lacks = f"the template of {model} has no {turns[name]!r}" if own else f"{model} is not here with a template"
        reason = f"{lacks}, so nobody knows whether it brings this one"
    reason += "; with --drop, that of the model. Or --chat_template FILE"
    draft.drop("chat_template", name, Group.LEARNS, reason, "chat_template")


def template_here(model: str) -> str | None:
    """The chat template of a model in a folder, or in the hub's cache; None if it has none there. Opens no network."""
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = Path(model, file)
        if not path.is_file():
            try:
                path = Path(str(try_to_load_from_cache(model, file)))
            except HFValidationError:  # neither an id nor a folder
                continue
        if not path.is_file():
            continue
        text = read_small(path, errors="replace")
        if file.endswith(".jinja"):
            return text
        with contextlib.suppress(ValueError):
            given = json.loads(text)
            if isinstance(given, dict) and given.get("chat_template"):
                return str(given["chat_template"])
    return None


def _data_of(draft: Draft, where: str, entry: dict[str, Any]) -> Data:
    """One data set, and what of it cannot be done here."""
    kind, files = _type_of(entry), as_list(entry.get("data_files"))
    path = entry.get("path", "")
    if not isinstance(path, str):
        draft.refuse(f"{where}.path", path, "a data set is a path or an id", "dataset")
    if files and path in ("json", "csv", "parquet", "arrow", "text"):
        path = ",".join(files) if len(files) > 1 else str(files[0])
    elif len(files) == 1 and entry.get("split") in (None, "train") and not os.path.exists(path):
        revision = f"@{entry['revision']}" if entry.get("revision") else ""
        path = f"hf://datasets/{path}{revision}/{files[0]}"
        entry = entry | dict.fromkeys(("name", "revision", "data_files"))
    elif files:
        draft.drop(f"{where}.data_files", files, Group.LEARNS, "download these files, and name them as dataset")
    for key, value in entry.items():
        if key not in _KNOWN and value not in (None, False):
            draft.drop(f"{where}.{key}", value, Group.LEARNS, "not known here")
    columns = _columns_of(draft, where, entry, kind)
    name = entry.get("name")
    config = str(name) if name is not None else None
    wording = _WORDINGS.get(str(entry.get("type"))) if draft.values.get("objective", "sft") == "sft" else None
    shards = entry.get("shards")  # of which axolotl takes one, drawn by its seed
    share = 1 / number(shards) if shards is not None and number(shards) > 1 else None
    return Data(path, config, entry.get("split"), entry.get("revision"), columns, wording, share)


def _columns_of(draft: Draft, where: str, entry: dict[str, Any], kind: str) -> dict[str, str]:
    """The columns of one data set. Adds to ``draft`` what is read in another way than there."""
    objective = draft.values.get("objective", "sft")
    full = str(entry.get("type"))
    if objective in ("dpo", "orpo", "simpo", "cpo", "ipo", "kto"):
        return _columns_of_preferences(draft, where, entry, full)
    if kind in _TEXTS:
        return {str(entry.get("field") or entry.get("text_column") or "text"): "text"}
    if kind in _ALPACA:
        if full not in _WORDINGS:
            reason = "this wording is not known here; write it as prompt_format. With --drop, the instruction alone"
            draft.drop("datasets.type", full, Group.LEARNS, reason)
        return {}
    if kind == "chat_template":
        return _columns_of_chat(draft, where, entry)
    draft.refuse(f"{where}.type", full, f"{_OWN_FORMAT}; docs/data.md has those of this kit", "dataset")
    return {}


def _columns_of_chat(draft: Draft, where: str, entry: dict[str, Any]) -> dict[str, str]:
    mapping = entry.get("message_property_mappings") or {}
    role = (
        entry.get("message_field_role")
        or mapping.get("role")
        or ("from" if "sharegpt" in str(entry["type"]) else "role")
    )
    default = "conversations" if "sharegpt" in str(entry["type"]) else "messages"
    columns = {str(entry.get("field_messages") or default): "conversations" if role == "from" else "messages"}
    if (content := entry.get("message_field_content") or mapping.get("content")) not in (None, "content", "value"):
        draft.drop(f"{where}.message_property_mappings", f"content: {content}", Group.LEARNS, "it is content, or value")
    if (tools := entry.get("field_tools")) not in (None, "tools"):
        columns[str(tools)] = "tools"
    for target, names in (entry.get("roles") or {}).items():
        if more := set(as_list(names)) - _ROLES.get(str(target), set()):
            draft.drop(f"{where}.roles", f"{target}: {sorted(more)}", Group.LEARNS, "these words are no roles here")
    trained = set(as_list(entry.get("roles_to_train")))
    if trained and trained <= _ROLES["assistant"]:
        pass
    elif {"user", "assistant"} <= trained or {"human", "gpt"} <= trained:
        draft.put("train_on", "all", "roles_to_train")
    elif trained:
        draft.drop(f"{where}.roles_to_train", sorted(trained), Group.LEARNS, "train_on: assistant, last or all")
    for key in ("train_on_eos", "train_on_eot"):
        if entry.get(key) not in (None, "turn"):
            draft.drop(f"{where}.{key}", entry[key], Group.LEARNS, "the token that ends a learned turn is learned")
    if entry.get("message_field_training") not in (None, "train"):
        reason = "a message that is not learned has `train: false`"
        draft.drop(f"{where}.message_field_training", entry["message_field_training"], Group.LEARNS, reason)
    if entry.get("field_thinking") not in (None, "thinking", "reasoning", "reasoning_content"):
        draft.drop(f"{where}.field_thinking", entry["field_thinking"], Group.LEARNS, "reasoning_content, or thinking")
    return columns


def _columns_of_preferences(draft: Draft, where: str, entry: dict[str, Any], full: str) -> dict[str, str]:
    template, _, kind = full.partition(".")
    if template in ("chatml", "llama3", "zephyr"):
        draft.put("chat_template", template, f"type {full}")
        if kind not in _PAIRS:
            draft.refuse(f"{where}.type", full, _OWN_PAIRS, "dataset")
        return dict(_PAIRS.get(kind, {}))
    if template == "chat_template":
        names = {"messages": entry.get("field_messages"), "chosen": entry.get("field_chosen")}
        names["rejected"] = entry.get("field_rejected")
        ours = {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"}
        if kind == "argilla":  # the conversations stand in chosen and rejected
            names["messages"] = None
        elif names["messages"] is None:
            names["messages"] = "messages"
        return {str(theirs): ours[name] for name, theirs in names.items() if theirs}
    draft.refuse(f"{where}.type", full, _OWN_PAIRS, "dataset")
    return {}
