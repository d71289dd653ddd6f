"""YAML of LLaMA-Factory's second generation (``model_class``, ``dist_config``), read from version 0.9.6.dev0, commit
ff6d4d1 of 2026-08-18: ``src/llamafactory/v1``.
"""

from pathlib import Path
from typing import Any

from kit.config.recipe_file import read_yaml
from kit.errors import UserError
from kit.tools.convert import trainer
from kit.tools.convert.data import Data, first_rows, put_data
from kit.tools.convert.draft import Draft, Group, is_true, number
from kit.tools.convert.modules import put_targets

KIT = "LLaMA-Factory"
RENAMES = {
    "model": "model_name_or_path",
    "cutoff_len": "max_length",
    "output_dir": "output_dir",
    "num_train_epochs": "num_train_epochs",
    "learning_rate": "learning_rate",
    "custom_chat_template": "chat_template",
}
_WORDING = "{instruction}[{input}]"
_OWN_ROWS = (
    "without a converter its rows are in LLaMA-Factory's own form, whose messages have parts of {type, value}; write "
    "them as plain messages, for --dataset FILE"
)


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file that have another name or form than here."""
    if "train_dataset" not in draft.given:
        draft.refuse("train_dataset", None, "absent, so it trains nothing", "dataset")
    if (kind := draft.take("model_class", "llm")) != "llm":
        draft.refuse("model_class", kind, "causal language models only")
    draft.rename(RENAMES)
    _take_method(draft)
    micro = int(number(draft.take("micro_batch_size", 1)))
    total = draft.take("global_batch_size", micro * draft.num_processes)
    draft.put("global_batch_size", int(number(total)), "" if total else f"{micro} a process")
    draft.put("per_device_train_batch_size", micro)
    name = str(dict(draft.take("dist_config", {})).get("name", ""))
    draft.config = "fsdp" if name else ""
    for key in ("kernel_config", "init_config", "dp_size", "batching_workers", "save_ckpt_as_hf", "dist_timeout"):
        draft.take(key)
    strategy = draft.take("batching_strategy", "normal")
    if "dynamic_batching" in str(strategy) or "dynamic_padding_free" in str(strategy):
        draft.drop("batching_strategy", strategy, Group.LEARNS, "a step has a number of samples; with --drop, the same")
    schedule = draft.take("lr_scheduler_config")
    if isinstance(schedule, dict):
        draft.given["lr_scheduler_type"] = schedule.get("name")
    optim = draft.take("optim_config")
    if optim is not None:
        draft.drop("optim_config", optim, Group.LEARNS, "optim lists the optimisers; with --drop, adamw_torch_fused")
    draft.put("gradient_checkpointing", is_true(draft.take("enable_activation_checkpointing", True)))
    trainer.take_common(draft)
    _take_data(draft, path)
    draft.take("pref_ftx")
    for name, value in {"learning_rate": 1e-4, "num_train_epochs": 3, "max_length": 2048}.items():
        draft.default(name, value, KIT)
    draft.default("lr_scheduler_type", "constant", KIT)
    draft.default("warmup_steps", 0, KIT)
    draft.default("weight_decay", 0.01, f"{KIT}: torch's, there also of norms and biases")


def _take_method(draft: Draft) -> None:
    given, quantised = draft.take("peft_config", {}), draft.take("quant_config")
    name = given.get("name", "full") if isinstance(given, dict) else given
    if name not in ("full", "lora"):
        draft.drop("peft_config.name", name, Group.LEARNS, "methods are full, lora and qlora; with --drop, full")
    elif name == "lora":
        draft.put("lora_r", given.get("r", 8))
        draft.put("lora_alpha", given.get("lora_alpha", 16))
        draft.put("lora_dropout", given.get("lora_dropout", 0.05))
        put_targets(draft, given.get("target_modules", "all"), "peft_config.target_modules")
        if given.get("adapter_name_or_path"):
            draft.put("adapter_name_or_path", given["adapter_name_or_path"])
    method = "lora" if name == "lora" else "full"
    draft.put("method", "qlora" if quantised and method == "lora" else method)


def _take_data(draft: Draft, path: Path) -> None:
    for name, ours in (("train_dataset", "dataset"), ("eval_dataset", "eval_dataset")):
        given = draft.take(name)
        if given is not None:
            put_data(draft, ours, _data_of(draft, name, str(given), path, ours))


def _data_of(draft: Draft, name: str, given: str, path: Path, ours: str) -> list[Data]:
    """The data sets that a file lists; one that is no such file is a data set itself, which has no converter."""
    if not given.endswith((".yaml", ".yml")):
        draft.refuse(name, given, _OWN_ROWS, ours)
        return []
    file = next((base / given for base in (Path(), *path.resolve().parents) if (base / given).is_file()), None)
    if file is None:
        draft.refuse(name, given, "not found from here; run it where you ran LLaMA-Factory, or --dataset FILE", ours)
        return []
    try:
        entries, _ = read_yaml(file)
    except UserError as error:
        draft.problems += error.problems
        return []
    return [_entry(draft, f"{name}.{key}", entry, file.parents[given.count("/")]) for key, entry in entries.items()]


def _entry(draft: Draft, where: str, entry: dict[str, Any], base: Path) -> Data:
    kind, source = entry.get("converter"), str(entry.get("path", ""))
    if kind is None:
        draft.refuse(where, source, _OWN_ROWS, "dataset")
    elif kind == "pair":
        draft.put("objective", "dpo")
        draft.put("beta", draft.take("pref_beta", 0.1))
    elif kind not in ("alpaca", "sharegpt"):
        draft.refuse(where, kind, "alpaca, sharegpt and pair are read; else --dataset FILE", "dataset")
    split, size = entry.get("split"), entry.get("size")
    is_local = entry.get("source") == "local"
    return Data(
        str(base / source) if is_local else source,
        split=first_rows(split, int(number(size))) if size else split,
        prompt_format=_WORDING if kind == "alpaca" else None,
    )
