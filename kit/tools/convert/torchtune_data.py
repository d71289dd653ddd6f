"""torchtune's builders of data sets, with the chat template that its tokenizers write themselves."""

from typing import Any

from kit.tools.convert.data import ALPACA, BARE, Data, put_data
from kit.tools.convert.draft import Draft, Group, is_nothing, is_true, number

_FAR = 8192  # tokens; where torchtune cuts nothing, a longer sample stops the start here
# What a tokenizer writes around messages: ours of the same text. Others write none, but for a prompt_template.
TEMPLATES = {
    "llama3": "llama3",
    "qwen2": "chatml",
    "qwen2_5": "chatml",
    "qwen3": "chatml",
    "phi3": "phi3",
    "phi4": "phi4",
}
# The wording of Alpaca after a tokenizer that writes [INST] by default. That of Gemma writes nothing.
_IN_TAGS = "[[INST]] " + ALPACA + " [[/INST]] "
_TAGGED, _BARE = ("llama2", "mistral"), "gemma"
_ALPACA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
# Builders of two columns, or of one list: their source, and its columns by our fields.
_PAIRS = {
    "instruct_dataset": ("", {"input": "prompt", "output": "completion"}),
    "samsum_dataset": ("Samsung/samsum", {"dialogue": "prompt", "summary": "completion"}),
    "grammar_dataset": ("liweili/c4_200m", {"input": "prompt", "output": "completion"}),
}
_PREFERENCES = {
    "preference_dataset": ("", {}),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", {}),
    "stack_exchange_paired_dataset": (
        "lvwerra/stack-exchange-paired",
        {"question": "prompt", "response_j": "chosen", "response_k": "rejected"},
    ),
}
_TEXTS = {
    "text_completion_dataset": ("", "text"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "page"),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "article"),
}


def take_data(draft: Draft) -> None:
    """Read the data sets, the lengths and what is learned from."""
    family = str(draft.take("tokenizer._component_", "")).split(".")[2:3]
    length = draft.take("tokenizer.max_seq_len")
    if length is not None:
        draft.put("max_length", int(number(length)))
    else:
        draft.put("max_length", _FAR)
        draft.put("excess_length_strategy", "error", "max_seq_len: null cuts nothing")
    has_default = "tokenizer.prompt_template" not in draft.given  # null: none
    if (prompt := draft.take("tokenizer.prompt_template")) is not None:
        draft.drop(
            "tokenizer.prompt_template", prompt, Group.LEARNS, "write it as a file, and give --chat_template FILE"
        )
    draft.put("shuffle", is_true(draft.take("shuffle", True)))
    draft.put("dataset_columns", "")
    name = family[0] if family else ""
    wording = _IN_TAGS if name in _TAGGED and has_default else ALPACA
    train = _data_of(draft, "dataset", name, wording)
    del draft.values["dataset_columns"]
    put_data(draft, "dataset", [train])
    validates = draft.take("run_val_every_n_steps")
    builder = draft.given.get("dataset_val._component_")
    if validates is not None and builder is not None:
        put_data(draft, "eval_dataset", [_data_of(draft, "dataset_val", name, wording)])
        draft.put("eval_steps", int(number(validates)))
    for key in [key for key in draft.given if key.startswith("dataset_val.")]:
        draft.given.pop(key)
    draft.take("batch_size_val")
    collate = draft.take("collate_fn")
    if collate is not None:
        draft.drop("collate_fn", collate, Group.NEEDLESS, "micro-batches are padded to their longest row, without loss")
    draft.put("train_on", draft.values.get("train_on", "assistant"))


def _data_of(draft: Draft, name: str, family: str, wording: str) -> Data:
    """One data set. ``wording``: the prompt format of its builder for Alpaca's rows."""
    given = {
        key.removeprefix(f"{name}."): draft.given.pop(key) for key in list(draft.given) if key.startswith(f"{name}.")
    }
    builder = str(given.pop("_component_", "")).rpartition(".")[2]
    source, column_map = given.pop("source", None), given.pop("column_map", None) or {}
    learns_input, packed = given.pop("train_on_input", builder in _ALPACA), given.pop("packed", False)
    if name == "dataset":
        draft.put("packing", is_true(packed))
    if is_true(learns_input):
        draft.put("train_on", "all", "train_on_input" if builder not in _ALPACA else f"the default of {builder}")
    system = given.pop("new_system_prompt", None)
    if system is not None:
        draft.put("system_prompt", system, "of conversations that have none; there in place of theirs too")
    data_files, split = given.pop("data_files", None), given.pop("split", "train")
    config = given.pop("subset", None) or given.pop("name", None)
    columns, own_source = _columns_of(draft, name, builder, family, column_map, given)
    path = str(source or own_source)
    if path in ("json", "csv", "parquet", "text") and data_files:
        path = ",".join(data_files) if isinstance(data_files, list) else str(data_files)
    elif data_files is not None:
        draft.drop(f"{name}.data_files", data_files, Group.LEARNS, "download these files, and name them as dataset")
    for key, value in given.items():
        if not is_nothing(value) and value is not False:
            draft.drop(f"{name}.{key}", value, Group.LEARNS, "not known here")
    return Data(path, config, split, columns=columns, prompt_format=wording if builder in _ALPACA else None)


def _columns_of(
    draft: Draft, name: str, builder: str, family: str, column_map: dict[str, str], given: dict[str, Any]
) -> tuple[dict[str, str], str]:
    """The columns of one builder, and its source. Takes from ``given`` what only this builder has."""
    template = TEMPLATES.get(family)
    where = f"{name}._component_"
    if builder in _ALPACA:
        if template is None and family in (*_TAGGED, _BARE):
            draft.template = BARE
        else:
            _put_template(draft, family, template)
        return {theirs: ours for ours, theirs in column_map.items()}, _ALPACA[builder]
    if builder in _TEXTS:
        source, column = _TEXTS[builder]
        given.pop("add_eos", None)
        if is_true(given.pop("split_across_pack", True)):
            draft.put("excess_length_strategy", "split")
        return {str(given.pop("column", column)): "text"}, source
    if builder in _PREFERENCES:
        source, columns = _PREFERENCES[builder]
        _put_template(draft, family, template)
        return {theirs: ours for ours, theirs in column_map.items()} or columns, source
    if builder in _PAIRS:
        source, columns = _PAIRS[builder]
        ours = {"input": "prompt", "output": "completion"}
        columns = {theirs: ours.get(key, key) for key, theirs in column_map.items()} or columns
        if template:
            as_chat = {"prompt": "instruction", "completion": "output"}
            columns = {theirs: as_chat.get(field, field) for theirs, field in columns.items()}
            _put_template(draft, family, template)
        return columns, source
    if builder in ("chat_dataset", "slimorca_dataset"):
        _put_template(draft, family, template)
        style = given.pop("conversation_style", "sharegpt" if builder == "slimorca_dataset" else "openai")
        column = given.pop("conversation_column", "conversations") if builder == "chat_dataset" else "conversations"
        return {str(column): "conversations" if style == "sharegpt" else "messages"}, "Open-Orca/SlimOrca-Dedup"
    reason = "no builder of torchtune's text data sets, so --dataset FILE; docs/data.md has the formats of this kit"
    draft.refuse(where, builder, reason, "dataset")
    return {}, ""


def _put_template(draft: Draft, family: str, template: str | None) -> None:
    if template:
        draft.put("chat_template", template, f"as the tokenizer of {family}")
    else:
        reason = "no template here gives the text of this tokenizer; with --drop, the model's own"
        draft.drop("tokenizer._component_", family, Group.LEARNS, reason)
