"""Files of TRL and alignment-handbook: what ``kits/trl.yaml`` cannot say.

The file does not say which script reads it. Keys that only some have say it, or a folder of that name.
"""

from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.tools.convert.common import entry, put_data, take_batch, take_evaluation, take_template, take_training
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_true, number

_OF_PAIRS = {"beta", "max_prompt_length", "precompute_ref_log_probs"}


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    loss = ",".join(as_list(draft.take("loss_type")))
    is_of_sft = loss in ("", "nll", "chunked_nll", "dft") and not _OF_PAIRS & set(draft.given)
    folders = [part.lower() for part in draft.path.parts[-4:]]
    named = next((name for name in ("orpo", "dpo", "kto", "cpo", "sft") if name in folders), "")
    draft.put("objective", named or ("sft" if is_of_sft else "dpo"), f"{named}, as its folder" if named else "")
    draft.put("method", "full")
    draft.given["loss_type"] = loss
    draft.read("loss_type", "use_peft", "load_in_4bit")
    take_batch(draft, 8)
    take_training(draft)
    _take_data(draft)
    take_evaluation(draft)
    if "{" in str(draft.given.get("chat_template")):
        take_template(draft, "chat_template")
    if (text := draft.take("dataset_text_field", "text")) not in ("text", "messages"):
        draft.put("dataset_columns", {str(text): "text"})
    is_of_answers = is_true(draft.take("assistant_only_loss")) or is_true(draft.take("completion_only_loss"))
    if draft.values["objective"] in ("sft", "dft"):
        draft.default("learning_rate", 2e-5)
        draft.put("train_on", "assistant" if is_of_answers else "all", "as TRL learns a conversation")
    draft.default("learning_rate", 1e-6)


def _take_data(draft: Draft) -> None:
    train, test = draft.take("dataset_train_split", "train"), draft.take("dataset_test_split", "test")
    mixture, name, config = (draft.take(key) for key in ("dataset_mixture", "dataset_name", "dataset_config"))
    mixture = mixture or {}
    parts = [_part(draft, each) for each in mixture.get("datasets", [])]
    parts += [entry(name, split=train, config=config)] if name else []
    put_data(draft, "dataset", parts)
    if mixture.get("test_split_size"):
        draft.put("eval_split_size", mixture["test_split_size"])
    elif not mixture and not is_false(draft.given.get("eval_strategy", "no")):
        put_data(draft, "eval_dataset", [entry(part.path, split=test, config=part.config) for part in parts])


def _part(draft: Draft, given: dict[str, Any]) -> DatasetEntry:
    """One part of a mixture; its weight there is the share of its rows that is taken, at random."""
    share = number(given.get("weight") or 1)
    if share > 1:
        draft.leave("dataset_mixture.weight", share, Group.LEARNS, "a part comes once in an epoch")
    config = given.get("config", given.get("name"))
    config = None if config == "default" else config
    path = given.get("id") or given.get("path")
    return entry(path, split=given.get("split"), config=config, max_samples=share if share < 1 else None)
