"""Files of axolotl: what ``kits/axolotl.yaml`` cannot say."""

import os
import re
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.tools.convert.common import entry, put_data, take_batch, take_evaluation, take_template, take_training
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_nothing, is_true

_NAMES = {
    "eval_batch_size": "per_device_eval_batch_size",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}
_PLUGINS_OF_SPEED = ("cut_cross_entropy", "liger", "kernels", "expert_parallel", "swanlab")
_PAIRS = ("dpo", "orpo", "simpo", "cpo", "kto", "reward")
_TEXTS = ("completion", "pretrain")
_BY_HAND = "this type has its own prompt text; write it with --chat_template, or a prompt_format: docs/data.md"
_KNOWN = set(
    """
    path type name split revision data_files ds_type field text_column field_messages message_property_mappings
    message_field_role message_field_content field_chosen field_rejected roles roles_to_train train_on_eos train_on_eot
    field_tools chat_template chat_template_jinja trust_remote_code conversation field_thinking template_thinking_key
    """.split()
)
_ROLES = {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}, "system": {"system"}, "tool": {"tool"}}


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    given = draft.given
    draft.put("method", "full")
    draft.read("rl", "reward_model", "adapter", "load_in_4bit")
    draft.has_images = "processor_type" in given
    if draft.has_images and draft.values["method"] == "full" and not is_true(given.get("freeze_mm_modules")):
        draft.put("train_only", "vision,projector,language", "axolotl trains them all")
    if is_true(draft.take("lora_target_linear")):
        modules = as_list(draft.take("lora_target_modules"))
        draft.put("lora_target_modules", "all-linear")
        if others := [name for name in modules if re.search("head|embed|wte", name)]:
            draft.leave("lora_target_modules", others, "all-linear does not include these; or name all modules")
    for theirs in _NAMES.keys() & given.keys():
        given[_NAMES[theirs]] = given.pop(theirs)
        draft.sources[_NAMES[theirs]] = theirs
    if "wandb_project" in given and not is_false(given.get("use_wandb")):
        given["report_to"] = "wandb"
    take_batch(draft, 1)
    take_training(draft)
    if (share := draft.take("cosine_min_lr_ratio")) is not None:
        draft.put("min_lr_rate", share)
        given["lr_scheduler_type"] = "cosine_with_min_lr"
    _take_data(draft)
    take_evaluation(draft)
    _take_special_tokens(draft)
    for plugin in map(str, as_list(draft.take("plugins"))):
        group = Group.SPEED if set(plugin.split(".")) & set(_PLUGINS_OF_SPEED) else Group.TRAINING
        draft.leave("plugins", plugin, "code of other kits is not run", group)


def _take_special_tokens(draft: Draft) -> None:
    """A padding token is masked out of the loss; the token that ends a text is trained on."""
    tokens = draft.take("tokens") if isinstance(draft.given.get("tokens"), dict) else {}  # its older name
    for key, value in (draft.take("special_tokens", {}) | tokens).items():
        if key == "additional_special_tokens":
            draft.put("new_tokens", as_list(value))
        elif not is_nothing(value):
            ends_turns = draft.values.get("chat_template", "bare") != "bare"
            is_trained = key not in ("pad_token", "unk_token") and not ends_turns
            group = Group.TRAINING if is_trained else Group.NEEDLESS
            reason = "the tokenizer's own is used; --new_tokens adds a missing one"
            draft.leave(f"special_tokens.{key}", value, reason, group)


def _take_data(draft: Draft) -> None:
    """Read the datasets, the chat template and the loss mask."""
    trains, tests = _sections(draft.take("datasets")), _sections(draft.take("test_datasets"))
    streams = [section | {"type": "pretrain"} for section in _sections(draft.take("pretraining_dataset"))]
    if streams:
        draft.put("streaming", True, "pretraining_dataset is a stream")
        draft.put("packing", True, "axolotl packs streams")
        draft.given.setdefault("save_strategy", "no")
    types = [_type_of(section) for section in trains + streams]
    entries = _entries(draft, "datasets", trains) + _entries(draft, "pretraining_dataset", streams)
    for key in ("chat_template", "chat_template_jinja"):  # that of a dataset is for all of them here
        draft.given[key] = next((each[key] for each in [draft.given, *trains] if not is_nothing(each.get(key))), None)
    has_text = not is_nothing(draft.given["chat_template_jinja"])
    if has_text or draft.given["chat_template"] == "tokenizer_default":
        draft.take("chat_template")
    if "alpaca" in types:
        for key in ("chat_template", "chat_template_jinja"):
            if (template := draft.take(key)) is not None:
                draft.leave(key, template, "alpaca rows use none", Group.NEEDLESS)
        draft.put("chat_template", "bare", "prompt_format has the whole prompt")
        if set(types) != {"alpaca"}:
            draft.refuse("datasets", types, "alpaca uses no chat template, the others do: train on one kind")
    take_template(draft, "chat_template_jinja" if has_text else "chat_template")
    put_data(draft, "dataset", entries)
    if tests:
        put_data(draft, "eval_dataset", _entries(draft, "test_datasets", tests))
        draft.take("val_set_size")
    draft.read("val_set_size")
    if types and set(types) <= set(_TEXTS):
        draft.put("excess_length_strategy", "split", "axolotl splits long texts")
        draft.take("excess_length_strategy")
    if is_true(draft.take("train_on_inputs")) and "chat_template" not in types:
        draft.put("train_on", "all", "train_on_inputs")


def _sections(value: Any) -> list[dict[str, Any]]:
    sections = value if isinstance(value, list) else [] if value is None else [value]
    return [section if isinstance(section, dict) else {"path": section} for section in sections if section]


def _type_of(section: dict[str, Any]) -> str:
    name = str(section.get("type") or "").split(":")[0].split(".")[0]
    return "chat_template" if name == "sharegpt" else name


def _entries(draft: Draft, key: str, sections: list[dict[str, Any]]) -> list[DatasetEntry]:
    return [_entry(draft, f"{key}[{i}]", section) for i, section in enumerate(sections)]


def _entry(draft: Draft, where: str, section: dict[str, Any]) -> DatasetEntry:
    """One dataset, and what of it cannot be done here."""
    path, files = str(section.get("path")), as_list(section.get("data_files"))
    revision = section.get("revision")
    if files and path in ("json", "csv", "parquet", "arrow", "text"):
        path = ",".join(map(str, files))
    elif len(files) == 1 and not os.path.exists(path):
        path = f"hf://datasets/{path}{f'@{revision}' if revision else ''}/{files[0]}"
        section, revision = section | {"name": None, "split": None}, None
    elif files:
        draft.leave(f"{where}.data_files", files, "download these files, and name them as dataset")
    for key, value in section.items():
        if key not in _KNOWN and not is_nothing(value) and not is_false(value):
            draft.leave(f"{where}.{key}", value, "unknown key")
    is_pair = draft.objective in _PAIRS
    wording = draft.table["prompt_formats"].get(str(section.get("type")))
    columns = (_columns_of_pairs if is_pair else _columns)(draft, where, section)
    config = None if section.get("name") is None else str(section["name"])
    return entry(path, columns, section.get("split"), revision=revision, config=config, prompt_format=wording)


def _columns(draft: Draft, where: str, section: dict[str, Any]) -> dict[str, str]:
    """The columns of a dataset of answers or text. Leaves out what is read in another way than there."""
    kind = _type_of(section)
    if kind in _TEXTS:
        return {str(section.get("field") or section.get("text_column") or "text"): "text"}
    if str(section.get("type")) in ("None", *draft.table["prompt_formats"]):  # without a type, input_ids
        return {}
    if kind != "chat_template":
        draft.refuse(f"{where}.type", section.get("type"), _BY_HAND)
        return {}
    mapping = section.get("message_property_mappings") or {}
    is_sharegpt = "sharegpt" in str(section["type"])
    role = section.get("message_field_role") or mapping.get("role") or ("from" if is_sharegpt else "role")
    content = section.get("message_field_content") or mapping.get("content")
    same = {
        "message_property_mappings": content in (None, "content", "value"),
        "roles": all(
            set(as_list(names)) <= _ROLES.get(str(role), set()) for role, names in (section.get("roles") or {}).items()
        ),
        "roles_to_train": set(as_list(section.get("roles_to_train"))) <= _ROLES["assistant"],
        "train_on_eos": section.get("train_on_eos") in (None, "turn"),
        "train_on_eot": section.get("train_on_eot") in (None, "turn"),
    }
    for key in [key for key, is_same in same.items() if not is_same]:
        draft.leave(f"{where}.{key}", section.get(key, content), "docs/data.md says how rows are read here")
    messages = str(section.get("field_messages") or ("conversations" if is_sharegpt else "messages"))
    columns = {messages: "conversations" if role == "from" else "messages"}
    return columns | ({str(section["field_tools"]): "tools"} if section.get("field_tools") else {})


def _columns_of_pairs(draft: Draft, where: str, section: dict[str, Any]) -> dict[str, str]:
    template, _, kind = str(section.get("type")).removeprefix("bradley_terry.").partition(".")
    if draft.objective == "reward":
        return {"input": "instruction"}
    if template in ("chatml", "llama3") and kind in draft.table["pairs"] and draft.objective != "kto":
        draft.given["chat_template"] = template
        return dict(draft.table["pairs"][kind])
    if template != "chat_template":
        draft.refuse(f"{where}.type", section.get("type"), _BY_HAND)
    columns = {str(section[f"field_{ours}"]): ours for ours in ("chosen", "rejected") if section.get(f"field_{ours}")}
    return columns | ({} if kind == "argilla" else {str(section.get("field_messages") or "messages"): "prompt"})
