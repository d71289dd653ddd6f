"""Files of TRL and alignment-handbook: what ``kits/trl.yaml`` cannot say.

The file does not say which script reads it: its path, its loss, or a key that one script alone reads may.
"""

import re
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.config.other_kits import meaning
from kit.system.errors import Problem
from kit.tools.convert.common import (
    FAR,
    entry,
    put_data,
    take_answers,
    take_batch,
    take_evaluation,
    take_template,
    take_training,
)
from kit.tools.convert.draft import Draft, as_list, is_false, is_true, number

_OBJECTIVES = "--objective sft, dpo, kto, orpo, cpo, simpo, reward or distil"


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    draft.put("method", "full")
    draft.given["loss_type"] = ",".join(as_list(draft.take("loss_type")))
    draft.read("loss_type", "use_peft", "load_in_4bit")
    _take_trainer(draft)
    take_batch(draft, 8)
    take_training(draft)
    _take_data(draft)
    take_evaluation(draft)
    if draft.objective == "distil":
        take_answers(draft)
    if "{" in str(draft.given.get("chat_template")):
        take_template(draft, "chat_template")
    if (text := draft.take("dataset_text_field", "text")) not in ("text", "messages"):
        draft.put("dataset_columns", {str(text): "text"})
    if is_true(draft.take("assistant_only_loss")) or is_true(draft.take("completion_only_loss")):
        draft.put("train_on", "assistant")
    if "max_length" in draft.lines and "max_length" not in draft.given:
        draft.put("max_length", FAR, "null: TRL truncates nothing; raise it if a sample is longer")
        draft.put("excess_length_strategy", "error")


def _take_trainer(draft: Draft) -> None:
    """Find what is trained: a loss says it, or the nearest word of the path, or a key that one trainer alone reads."""
    if {"objective"} & {*draft.values, *draft.typed}:
        return
    words = [word for part in draft.path.parts[:-5:-1] for word in re.findall("[a-z]+", part.lower())]
    names = [name for name, keys in draft.table["trainers"].items() if draft.given.keys() & set(keys.split())]
    for name in [*words, *names]:
        found = meaning("trainer", name, "TRL")
        if found and (found.kind == "refused" or "objective" in found.settings):
            draft.given["trainer"] = name
            if name == "distillation":
                draft.keeps_dropout = True
                draft.given.setdefault("distil_temperature", draft.given.get("temperature"))
            draft.read("trainer")
            return
    draft.refused.append(
        Problem(str(draft.path), "the file does not say which of TRL's trainers reads it", fix=_OBJECTIVES)
    )


def _take_data(draft: Draft) -> None:
    train, test = draft.take("dataset_train_split", "train"), draft.take("dataset_test_split", "test")
    name, config = draft.take("dataset_name"), draft.take("dataset_config")
    own = {"datasets": draft.take("datasets", []), "test_split_size": draft.take("test_split_size")}
    mixture = draft.take("dataset_mixture", own)
    parts = [_part(draft, each) for each in mixture["datasets"]]
    is_mixture = bool(parts)
    parts += [entry(name, split=train, config=config)] if name else []
    put_data(draft, "dataset", parts)
    if mixture.get("test_split_size"):
        draft.put("eval_split_size", mixture["test_split_size"])
    elif not is_mixture and not is_false(draft.given.get("eval_strategy", "no")):
        put_data(draft, "eval_dataset", [entry(part.path, split=test, config=part.config) for part in parts])


def _part(draft: Draft, given: dict[str, Any]) -> DatasetEntry:
    """One part of a mixture; its weight there is the share of its rows that is taken, at random."""
    share = number(given.get("weight") or 1)
    if share > 1 or given.get("fraction"):
        draft.leave("datasets.weight", given, "each part occurs once per epoch here; weight differs")
    config = given.get("config", given.get("name"))
    config = None if config == "default" else config
    path = given.get("id") or given.get("path")
    return entry(path, split=given.get("split"), config=config, max_samples=share if share < 1 else None)
