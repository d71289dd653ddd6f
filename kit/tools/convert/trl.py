"""YAML of TRL's scripts and of alignment-handbook, read from TRL 1.10.0.dev0, commit f2cd577 of 2026-07-24
(``trainer/*_config.py``, ``scripts/utils.py``), and alignment-handbook, commit 925acdf of 2025-07-29
(``src/alignment``).

The file does not say which script reads it. Keys that only some have say it, or a folder of that name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.config.recipe_file import read_yaml
from kit.tools.convert import trainer
from kit.tools.convert.data import Data, put_data
from kit.tools.convert.draft import Draft, Group, is_nothing, is_true, number
from kit.tools.convert.modules import put_targets

KIT = "TRL"
RENAMES = {
    "model_name_or_path": "model_name_or_path",
    "num_train_epochs": "num_train_epochs",
    "learning_rate": "learning_rate",
    "max_seq_length": "max_length",
    "output_dir": "output_dir",
    "packing": "packing",
}
# What the Accelerate configs that TRL ships say of processes and shards (``accelerate_configs/``).
_LAUNCHES: dict[str, dict[str, Any]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"num_processes": 8},
    **{name: {"num_processes": 8, "fsdp_config": {"version": name[-1]}} for name in ("fsdp1", "fsdp2")},
    **{f"zero{stage}": {"num_processes": 8, "deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)},
}
_LOSSES_OF_SFT = ("nll", "chunked_nll", "dft")
_DEFAULT_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6}


def convert(draft: Draft, path: Path = Path()) -> None:
    """Read all keys of the file that have another name or form than here."""
    _take_launch(draft)
    trainer.take_switches_off(draft)
    objective = _take_objective(draft, path)
    _take_method(draft)
    draft.rename(RENAMES)
    if draft.given.get("model_revision") == "main":
        draft.take("model_revision")
    trainer.take_batch(draft, 8, 1)
    trainer.take_common(draft)
    _take_data(draft)
    trainer.take_evaluation(draft)
    _take_what_is_learned(draft, objective)
    draft.needless("eos_token", "the chat template ends turns")
    draft.default("gradient_checkpointing", True, KIT)
    defaults = {"learning_rate": _DEFAULT_RATES.get(objective, 1e-6), "num_train_epochs": 3, "max_length": 1024}
    for name, value in ({**defaults, "lr_scheduler_type": "linear", "warmup_steps": 0}).items():
        draft.default(name, value, KIT)


def num_processes(values: Mapping[str, Any]) -> int | None:
    """How many processes a file asks ``accelerate launch`` for, by itself or in the Accelerate config that it names."""
    given = values.get("num_processes", (_launch(values.get("accelerate_config")) or {}).get("num_processes"))
    return None if is_nothing(given) else int(number(given))


def _launch(name: Any) -> Mapping[str, Any] | None:
    """The Accelerate config that ``trl`` hands to ``accelerate launch``, a file or one that it ships; None: neither."""
    return read_yaml(Path(str(name)))[0] if Path(str(name)).is_file() else _LAUNCHES.get(str(name))


def _take_launch(draft: Draft) -> None:
    draft.take("num_processes")
    if (name := draft.take("accelerate_config")) is None:
        return
    launch = _launch(name)
    if launch is None:
        reason = "there is no such file here, which says how many processes there are: --num_processes N"
        draft.drop("accelerate_config", name, Group.LEARNS if draft.num_processes == 1 else Group.SPEED, reason)
    else:
        draft.given |= {"fsdp_config": launch.get("fsdp_config"), "deepspeed": launch.get("deepspeed_config")}


def _take_objective(draft: Draft, path: Path) -> str:
    """The objective by the keys of its trainer, or by the folders above the file."""
    folders = [part.lower() for part in path.resolve().parts[-4:]]
    named = next((name for name in ("orpo", "dpo", "kto", "cpo", "sft") if name in folders), None)
    loss = draft.take("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    prefers = loss not in (None, *_LOSSES_OF_SFT) or {"beta", "max_prompt_length"} & set(draft.given)
    by_keys = "dpo" if prefers else "sft"
    objective = named if named and (named != "sft" or by_keys == "sft") else by_keys
    draft.put("objective", objective, "the folder says so" if named == objective else "")
    losses = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "sigmoid_norm": "sigmoid_norm"}
    if objective == "sft" and loss in _LOSSES_OF_SFT:
        draft.put("objective", "dft" if loss == "dft" else "sft")
    elif loss in losses and objective == "dpo":
        draft.put("dpo_loss", losses[loss])
    elif loss in ("simpo", "orpo"):
        objective = loss
        draft.put("objective", loss)
    elif loss is not None and loss not in ("kto", "sigmoid"):
        draft.drop("loss_type", loss, Group.LEARNS, "dpo_loss: sigmoid, ipo, hinge, robust; with --drop, sigmoid")
    if (beta := draft.take("beta")) is not None:
        draft.put("beta", beta)
    if objective != "sft" and (length := draft.take("max_prompt_length")) is not None:
        reason = "a prompt is cut only where it is too long with its answer"
        draft.drop("max_prompt_length", length, Group.LEARNS, reason)
    return objective


def _take_method(draft: Draft) -> None:
    in_4bit, uses_adapters = draft.is_on("load_in_4bit"), draft.is_on("use_peft")
    draft.put("method", "full" if not uses_adapters else "qlora" if in_4bit else "lora")
    if not uses_adapters:
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save"):
            draft.take(key)
        return
    draft.rename({"lora_r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"})
    targets = draft.take("lora_target_modules")
    if targets is None:
        draft.put("lora_target_modules", ["q_proj", "v_proj"], "the default of peft for Llama, Mistral and others")
    else:
        put_targets(draft, targets)
    draft.default("lora_dropout", 0.05, KIT)


def _take_data(draft: Draft) -> None:
    mixture, name = draft.take("dataset_mixture"), draft.take("dataset_name")
    mixer = draft.take("dataset_mixer")
    splits = draft.take("dataset_splits", [])
    evaluates = str(draft.given.get("eval_strategy", "no")) not in ("no", "False")
    train, test = draft.take("dataset_train_split", "train"), draft.take("dataset_test_split", "test")
    config = draft.take("dataset_config")
    if isinstance(mixture, dict):
        parts = [_of_mixture(draft, each) for each in mixture.get("datasets", [])]
        put_data(draft, "dataset", parts)
        size = mixture.get("test_split_size")
        if not is_nothing(size):
            draft.put("eval_split_size", size)
    elif isinstance(mixer, dict):
        parts = [_of_mixture(draft, {"id": each, "weight": share}) for each, share in mixer.items()]
        first = [split for split in splits if "train" in str(split)]
        put_data(draft, "dataset", [replace(part, split=first[0] if first else part.split) for part in parts])
        tests = [split for split in splits if "test" in str(split)]
        if tests and evaluates:
            put_data(draft, "eval_dataset", [Data(part.path, split=str(tests[0])) for part in parts])
    elif name is not None:
        put_data(draft, "dataset", [Data(str(name), config, str(train))])
        if evaluates:
            put_data(draft, "eval_dataset", [Data(str(name), config, str(test))])


def _of_mixture(draft: Draft, entry: dict[str, Any]) -> Data:
    """One part of a mixture; its weight there is the share of its rows that is taken, at random."""
    split, share = str(entry.get("split", "train")), number(entry.get("weight", entry.get("fraction")) or 1)
    if share > 1:
        draft.drop("dataset_mixture.weight", share, Group.LEARNS, "a part comes once in an epoch")
    config = entry.get("config", entry.get("name"))
    path = str(entry.get("id") or entry.get("path"))
    return Data(path, None if config == "default" else config, split, max_samples=share if share < 1 else None)


def _take_what_is_learned(draft: Draft, objective: str) -> None:
    template = draft.take_first("chat_template", "chat_template_path")
    if template is not None and "{" in str(template):
        draft.template = str(template)
    elif template is not None:
        draft.put("chat_template", template)
    answers = draft.is_on("assistant_only_loss"), is_true(draft.take("completion_only_loss"))
    if objective == "sft" and not any(answers):
        draft.put("train_on", "all", "every token of a conversation, as TRL learns")
    if (text := draft.take("dataset_text_field")) not in (None, "text", "messages"):
        draft.put("dataset_columns", f"{text}=text")
    mode = draft.take("truncation_mode")
    if mode == "keep_end" and objective == "sft":
        draft.put("excess_length_strategy", "keep_end")
    if draft.is_on("shuffle_dataset"):
        draft.drop("shuffle_dataset", True, Group.NEEDLESS, "the order is drawn anew in each epoch")
