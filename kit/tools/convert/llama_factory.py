"""Files of LLaMA-Factory: what ``kits/llama_factory.yaml`` cannot say."""

from pathlib import Path
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.system.durable import read_object
from kit.tools.convert.common import entry, put_data, take_batch, take_evaluation, take_template, take_training
from kit.tools.convert.draft import Draft, as_list, is_true, number

_FIELDS = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label"}
_FIELDS |= {name: name for name in ("system", "tools", "chosen", "rejected", "history", "images")}
_ROLES = {"human", "user", "gpt", "assistant", "observation", "function_call", "system", "tool"}


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    given = draft.given
    given.setdefault("do_train", "train_dataset" in given)  # its v1 has no such switch
    draft.put("method", "lora")
    is_pretraining = given.get("stage") == "pt"
    draft.read("stage", "pref_loss", "finetuning_type", "quantization_bit")
    take_batch(draft, 8)
    take_training(draft)
    _take_data(draft)
    take_evaluation(draft)
    template = draft.take("template")
    if not is_pretraining:
        given["template"] = template
        take_template(draft, "template")
    if draft.values["method"] != "full" and "adapter_type" not in draft.values:
        given.setdefault("lora_alpha", 2 * int(number(given.get("lora_rank", 8))))
    if draft.has_images and str(template).startswith("qwen"):
        draft.given = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32} | given


def _take_data(draft: Draft) -> None:
    """Read the datasets by ``dataset_info.json``: in the working folder, or above the file."""
    folder, limit = str(draft.take("dataset_dir", "data")), draft.take("max_samples")
    files = [base / folder / "dataset_info.json" for base in (Path(), *draft.path.resolve().parents)]
    file = next((file for file in files if file.is_file()), Path(folder))
    info = read_object(file)
    for name in ("dataset", "eval_dataset"):
        names = as_list(draft.take(name))
        for each in [each for each in names if each not in info]:
            reason = f"it is not in {folder}/dataset_info.json; run it where you ran LLaMA-Factory, or --{name} FILE"
            draft.refuse(name, each, reason)
        put_data(draft, name, [_entry(draft, each, info[each], file.parent, limit) for each in names if each in info])


def _entry(draft: Draft, name: str, info: dict[str, Any], folder: Path, limit: Any) -> DatasetEntry:
    path = info.get("hf_hub_url") or info.get("ms_hub_url") or folder / info.get("file_name", "")
    columns = {key: str(column) for key, column in (info.get("columns") or {}).items() if column is not None}
    if path == folder or {"videos", "audios"} & set(columns):
        draft.refuse(
            "dataset",
            name,
            "loading scripts, video and audio are not supported; write its rows to a file, for --dataset FILE",
        )
    draft.has_images |= "images" in columns
    is_alpaca = info.get("formatting", "alpaca") == "alpaca"
    ours = _columns(columns) if is_alpaca else _columns_of_chat(draft, name, info, columns)
    split, drawn = info.get("split"), info.get("num_samples")  # drawn at random; max_samples takes the first ones
    if limit is not None and drawn is None and isinstance(path, str):
        split = f"{split or 'train'}[:{int(number(limit))}]"
    elif limit is not None:
        drawn = min(drawn or limit, limit)
    wording = "{instruction}[\n{input}]" if "input" in ours.values() else None
    return entry(path, ours, split, config=info.get("subset"), prompt_format=wording, max_samples=drawn)


def _columns(columns: dict[str, str]) -> dict[str, str]:
    """The columns of rows with an instruction, or with a text alone."""
    columns = columns or {"prompt": "instruction", "query": "input", "response": "output"}
    return {columns["prompt"]: "text"} if list(columns) == ["prompt"] else _fields(columns)


def _fields(columns: dict[str, str]) -> dict[str, str]:
    fields = _FIELDS | ({"response": "completion"} if "kto_tag" in columns else {})
    return {column: fields[key] for key, column in columns.items() if key in fields}


def _columns_of_chat(draft: Draft, name: str, info: dict[str, Any], columns: dict[str, str]) -> dict[str, str]:
    """The columns of rows with messages."""
    tags = dict(info.get("tags") or {})
    role = tags.pop("role_tag", "from" if info["formatting"] == "sharegpt" else "role")
    tags.pop("content_tag", None)
    if strange := set(map(str, tags.values())) - _ROLES:
        draft.leave(f"dataset.{name}.tags", sorted(strange), "unknown roles")
    ours = "completion" if "kto_tag" in columns else "prompt" if is_true(info.get("ranking")) else ""
    messages = columns.pop("messages", "conversations")
    return {messages: ours or ("conversations" if role == "from" else "messages")} | _fields(columns)
