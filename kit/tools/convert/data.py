"""Data sets of a recipe, from those of another kit."""

import json
from dataclasses import dataclass, field
from typing import Any

from kit.config.dataset_entry import DatasetEntry, with_own_names
from kit.tools.convert.draft import Draft

# The prompt of Stanford Alpaca, as axolotl writes it.
ALPACA = (
    "Below is an instruction that describes a task[, paired with an input that provides further context]. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}[\n\n### Input:\n{input}]\n\n### Response:\n"
)
# The chat template of rows whose whole text stands in their prompt_format.
BARE = """\
{%- if messages | map(attribute='role') | list not in [['user'], ['user', 'assistant']] -%}
{{- raise_exception('a question and its answer are expected, without a system message') -}}
{%- endif -%}
{{- bos_token | default('', true) + messages[0]['content'] -}}
{%- if messages | length == 2 -%}{{- messages[1]['content'] + eos_token -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Data:
    """One data set: where it is, and which column is what.

    ``columns`` maps a column to the kit's field; a column that has the field's name may be left out. ``prompt_format``
    is that of its rows with an instruction; ``max_samples`` rows are drawn, below 1 that share of them; ``replace`` has
    other texts for some in its rows.
    """

    path: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    prompt_format: str | None = None
    max_samples: float | None = None
    replace: dict[str, str] | None = None

    def entry(self) -> DatasetEntry:
        """As an entry of the list ``dataset``."""
        columns = {theirs: ours for theirs, ours in self.columns.items() if theirs != ours}
        split = None if self.split == "train" else self.split
        return DatasetEntry(
            path=self.path,
            config=self.config,
            split=split,
            revision=self.revision,
            columns=columns or None,
            prompt_format=self.prompt_format,
            max_samples=self.max_samples,
            replace=self.replace,
        )


def put_data(draft: Draft, name: str, data: list[Data]) -> None:
    """Set ``dataset`` or ``eval_dataset``: by single settings if it is one, else as a list."""
    entries = [each.entry() for each in data if each.path]
    if name == "eval_dataset" and len(entries) == 1 and entries[0].split is None:
        entries = [entries[0].model_copy(update={"split": "train"})]  # the default of eval_dataset_split is test
    if not entries:
        return
    first = entries[0]
    needs_list = any(each is not None for each in (first.prompt_format, first.max_samples, first.replace))
    if len(entries) > 1 or needs_list or (name == "eval_dataset" and first.columns):
        fields = [_shown_entry(entry) for entry in with_own_names(entries)]
        draft.put(name, fields)
        return
    draft.put(name, first.path)
    prefix = name
    for key in ("config", "split", "revision"):
        if value := getattr(first, key):
            draft.put(f"{prefix}_{key}", value)
    if first.columns:
        draft.put("dataset_columns", columns_as_typed(first.columns))


def _shown_entry(entry: DatasetEntry) -> dict[str, Any]:
    values = entry.as_written()
    if "columns" in values:
        values["columns"] = columns_as_typed(values["columns"])
    return values


def columns_as_typed(columns: dict[str, str]) -> str:
    """``question=instruction,answer=output``, or JSON where a name has one of these characters."""
    if any(set("=,{") & set(name) for name in columns):
        return json.dumps(columns, ensure_ascii=False)
    return ",".join(f"{theirs}={ours}" for theirs, ours in columns.items())


def first_rows(split: str | None, num_rows: int) -> str:
    """A split with its first ``num_rows`` rows only; one that has a slice stays as it is."""
    split = split or "train"
    return split if "[" in split else f"{split}[:{num_rows}]"
