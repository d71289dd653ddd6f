"""LLaMA-Factory's YAML, read from version 0.9.6.dev0, commit ff6d4d1 of 2026-08-18: ``hparams``, ``data`` and
``train``."""

import json
from pathlib import Path
from typing import Any

from kit.config import other_kits
from kit.durable import read_small
from kit.tools.convert import trainer
from kit.tools.convert.axolotl_data import put_template
from kit.tools.convert.data import Data, first_rows, put_data
from kit.tools.convert.draft import Draft, Group, as_list, is_nothing, is_true, number
from kit.tools.convert.modules import put_adapter_type, put_initialisation, put_targets

KIT = "LLaMA-Factory"
RENAMES = {
    "cutoff_len": "max_length",
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "additional_target": "lora_modules_to_save",
    "adapter_name_or_path": "adapter_name_or_path",
    "model_revision": "model_revision",
    "num_train_epochs": "num_train_epochs",
    "learning_rate": "learning_rate",
    "early_stopping_steps": "early_stopping_patience",
    "new_special_tokens": "new_tokens",
    "add_tokens": "new_tokens",
    "add_special_tokens": "new_tokens",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "buffer_size": "shuffle_buffer_size",
}
TEMPLATES = {
    "llama3": "llama3",
    "chatml": "chatml",
    "alpaca": "alpaca",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "phi": "phi3",
    "phi4": "phi4",
    "qwen3_nothink": "chatml",
}
TURNS = {
    **dict.fromkeys(("qwen", "qwen3", "qwen3_5", "falcon_h1", "smollm2"), "<|im_start|>"),
    "gemma4": "<|turn>",
    "deepseek": "User: ",
    **dict.fromkeys(("deepseek3", "deepseekr1"), "<｜User｜>"),
    **dict.fromkeys(("glm4", "glm4_moe"), "<|user|>"),
    "gpt_oss": "<|start|>",
    **dict.fromkeys(("granite3", "granite4"), "<|start_of_role|>"),
    "llama4": "<|header_start|>",
    "ministral3": "[INST]",
}
_OBJECTIVES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "pt": "sft"}
_WORDING = "{instruction}[\n{input}]"


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file that have another name or form than here."""
    draft.names["chat_template"] = "template"
    stage = draft.take("stage", "sft")
    if "export_dir" in draft.given or not is_true(draft.given.get("do_train")):
        draft.refuse(
            "do_train", draft.given.get("do_train"), "it trains nothing; kit export merges, other programs generate"
        )
    elif stage not in _OBJECTIVES:
        draft.refuse("stage", stage, other_kits.REWARDS)
    _take_objective(draft, stage)
    _take_method(draft)
    draft.rename({"model_name_or_path": "model_name_or_path"})
    draft.rename(RENAMES)
    trainer.take_switches_off(draft)
    trainer.take_batch(draft, 8, 1)
    if draft.is_on("use_swanlab"):
        trainer.take_tracker(draft, "swanlab", "swanlab_project", "swanlab_run_name")
    if draft.is_on("use_unsloth_gc"):
        draft.given["gradient_checkpointing"] = "use_unsloth_gc"  # it keeps the inputs of layers in the CPU's memory
    if draft.is_on("use_muon"):
        draft.given["optim"] = "muon"
    trainer.take_common(draft)
    _take_data(draft, path, stage)
    trainer.take_evaluation(draft)
    if draft.is_on("disable_gradient_checkpointing"):
        draft.put("gradient_checkpointing", False)
    draft.default("gradient_checkpointing", True, KIT)
    draft.needless("enable_thinking", "it is for the templates of models that think")
    defaults = {"learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0}
    for name, value in defaults.items():
        draft.default(name, value, KIT)
    takes_rank = draft.values["method"] != "full" and "adapter_type" not in draft.values
    if takes_rank and "adapter_name_or_path" not in draft.values:
        draft.default("lora_r", 8, KIT)
        draft.default("lora_alpha", 2 * int(number(draft.values["lora_r"])), f"{KIT}, twice the rank")


def _take_objective(draft: Draft, stage: str) -> None:
    objective = _OBJECTIVES.get(stage, "sft")
    loss = draft.take("pref_loss", "sigmoid")
    if stage == "dpo" and loss in ("orpo", "simpo"):
        objective = loss
    elif stage == "dpo" and loss in ("hinge", "ipo"):
        draft.put("dpo_loss", loss)
    elif stage == "dpo" and loss != "sigmoid":
        draft.drop("pref_loss", loss, Group.LEARNS, "dpo_loss: sigmoid, ipo, hinge, robust; with --drop, sigmoid")
    if draft.is_on("use_dft_loss"):
        objective = "dft"
    if draft.is_on("use_eaft_loss"):
        objective = "eaft"
        draft.put("eaft_alpha", draft.take("eaft_alpha", 1.0))
    else:
        draft.take("eaft_alpha")
    draft.put("objective", objective)
    beta, smoothing, gamma = draft.take("pref_beta", 0.1), draft.take("dpo_label_smoothing"), draft.take("simpo_gamma")
    if stage in ("dpo", "kto"):
        draft.put("beta", beta)
    if stage == "dpo" and smoothing is not None and number(smoothing):
        draft.put("label_smoothing", smoothing)
    if objective == "simpo":
        draft.put("simpo_gamma", gamma if gamma is not None else 0.5)
    if (share := draft.take("pref_ftx")) is not None and number(share):
        draft.drop("pref_ftx", share, Group.LEARNS, "the cross-entropy of the chosen answers is part of cpo and orpo")
    draft.take("ref_model")


def _take_method(draft: Draft) -> None:
    method, bits = draft.take("finetuning_type", "lora"), draft.take("quantization_bit")
    if method == "freeze":
        layers = draft.take("freeze_trainable_layers", 2)
        draft.drop(
            "finetuning_type",
            f"freeze, of {layers} layers",
            Group.LEARNS,
            "use train_only, by their names; with --drop, full",
        )
        draft.take("freeze_trainable_modules")
        method = "full"
    elif method not in ("lora", "full"):
        put_adapter_type(draft, method, "finetuning_type")
        method = "lora"
    if bits is not None and number(bits) == 4:
        method = "qlora"
    elif bits is not None:
        draft.drop("quantization_bit", bits, Group.SPEED, "the base stays in bf16: more memory")
    draft.put("method", method)
    is_oft = "adapter_type" in draft.values
    if is_oft and (size := draft.take("oft_block_size")) is not None:
        draft.put("adapter_options", {"oft_block_size": size})
    key = "oft_target" if is_oft else "lora_target"
    if (targets := draft.take(key)) is not None and method != "full":
        put_targets(draft, targets, key)
    if draft.is_on("pissa_init"):
        steps = number(draft.take("pissa_iter", 16))
        put_initialisation(draft, "pissa" if steps == -1 else f"pissa_niter_{steps:g}", "pissa_init")
        draft.take("pissa_convert")
    if method == "full" or is_oft:
        for key in ("lora_target", "lora_rank", "lora_alpha", "lora_dropout"):
            draft.take(key)


def _take_data(draft: Draft, path: Path, stage: str) -> None:
    """Read the data sets by ``dataset_info.json``, the template and what is learned from."""
    folder = draft.take("dataset_dir", "data")
    info = _dataset_info(str(folder), path)
    limit = draft.take("max_samples")
    for name, ours in (("dataset", "dataset"), ("eval_dataset", "eval_dataset")):
        names = as_list(draft.take(name))
        known = [each for each in names if info is not None and each in info[0]]
        if names and info is None and folder != "ONLINE":
            reason = f"run it in the folder that holds {folder}/dataset_info.json; or --dataset FILE"
            draft.refuse(name, ", ".join(names), reason, ours)
            continue
        if folder == "ONLINE":
            put_data(draft, ours, [Data(each) for each in names])
            continue
        for each in names:
            if each not in known:
                draft.refuse(name, each, f"it is not in {folder}/dataset_info.json", ours)
        assert info is not None or not names
        data = [_data_of(draft, each, info[0][each], info[1], limit) for each in known] if info else []
        put_data(draft, ours, data)
    if (size := draft.take("val_size")) is not None and number(size) > 0:
        draft.put("eval_split_size", size)
    name = draft.take("template")
    if name is not None and stage != "pt":
        put_template(draft, str(name), TEMPLATES, TURNS)
    _take_what_is_learned(draft, stage)


def _take_what_is_learned(draft: Draft, stage: str) -> None:
    if draft.is_on("train_on_prompt"):
        draft.put("train_on", "all", "train_on_prompt")
    if draft.is_on("mask_history"):
        draft.put("train_on", "last", "mask_history")
    packing, neat = draft.take("packing"), draft.is_on("neat_packing")
    if is_true(packing) or neat or (packing is None and stage == "pt"):
        draft.put("packing", True, "" if neat else "here no sample sees another")
    if stage == "pt":
        draft.put("excess_length_strategy", "split", "as LLaMA-Factory divides long texts")
    if draft.is_on("disable_shuffling"):
        draft.put("shuffle", False)
    if "streaming" not in draft.given:
        draft.values.pop("shuffle_buffer_size", None)


def _dataset_info(folder: str, path: Path) -> tuple[dict[str, Any], Path] | None:
    """The content of ``dataset_info.json`` and its folder: here, or above the file; None if it is not found."""
    for base in (Path(), *path.resolve().parents):
        file = base / folder / "dataset_info.json"
        if file.is_file():
            try:
                info = json.loads(read_small(file))
            except (OSError, ValueError):
                return None
            return (info, base / folder) if isinstance(info, dict) else None
    return None


def _data_of(draft: Draft, name: str, info: dict[str, Any], folder: Path, limit: Any) -> Data:
    path = info.get("hf_hub_url") or info.get("ms_hub_url") or str(folder / str(info.get("file_name", "")))
    if "script_url" in info and "hf_hub_url" not in info:
        draft.refuse("dataset", name, "a loading script; save its rows as JSON lines, for --dataset FILE", "dataset")
    columns = {str(ours): str(theirs) for ours, theirs in (info.get("columns") or {}).items() if theirs is not None}
    for kind in ("images", "videos", "audios"):
        if kind in columns:
            draft.refuse("dataset", name, f"it has {kind}, and this kit reads only text", "dataset")
    split = info.get("split")
    drawn = [int(number(each)) for each in (info.get("num_samples"), limit) if each is not None]
    ours = _columns_of(draft, name, info, columns)
    wording = _WORDING if "input" in ours.values() else None
    if is_nothing(info.get("num_samples")):
        split = first_rows(split, drawn[0]) if drawn else split
        return Data(path, info.get("subset"), split, None, ours, wording)
    return Data(path, info.get("subset"), split, None, ours, wording, min(drawn))  # num_samples are drawn


def _columns_of(draft: Draft, name: str, info: dict[str, Any], columns: dict[str, str]) -> dict[str, str]:
    """Our columns of one entry of ``dataset_info.json``."""
    tags = info.get("tags") or {}
    more: dict[str, str] = {
        columns[key]: key for key in ("system", "tools", "chosen", "rejected", "history") if key in columns
    }
    tag = columns.get("kto_tag")
    if info.get("formatting", "alpaca") == "alpaca":
        texts = columns or {"prompt": "instruction", "query": "input", "response": "output"}
        if list(texts) == ["prompt"]:
            return {texts["prompt"]: "text"}
        if "query" in texts:
            more[texts["query"]] = "input"
        if tag is not None:
            more |= {tag: "label"} | ({texts["response"]: "completion"} if "response" in texts else {})
        elif "response" in texts:
            more[texts["response"]] = "output"
        prompt = texts.get("prompt", "instruction")
        return {prompt: "instruction"} | more
    role = tags.get("role_tag", "from" if info["formatting"] == "sharegpt" else "role")
    words = {tags.get(key) for key in ("user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")}
    known = {None, "human", "user", "gpt", "assistant", "observation", "function_call", "system", "tool"}
    if strange := words - known:
        draft.drop(f"dataset.{name}.tags", sorted(map(str, strange)), Group.LEARNS, "these words are no roles here")
    messages = columns.get("messages", "conversations")
    ours = "conversations" if role == "from" else "messages"
    if tag is not None:
        return {messages: "completion", tag: "label"} | more
    return {messages: "prompt" if is_true(info.get("ranking")) else ours} | more
