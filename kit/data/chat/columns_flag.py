"""The flag to type for a mapping of columns: ``--dataset_columns``, or the list of data sets with the mapping in it.

Promise: what it writes arrives as it is meant, if it is pasted into a shell.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kit.config.dataset_entry import DatasetEntry, flag_of_list


def columns_flag(columns: Mapping[str, str]) -> str:
    """Return ``--dataset_columns`` with this mapping, their column to our field; as JSON if a name has separators."""
    text = ",".join(f"{theirs}={ours}" for theirs, ours in columns.items())
    if any(re.search(r"[,=]", name) for name in columns):
        text = json.dumps(dict(columns), ensure_ascii=False)
    return f"--dataset_columns {shlex.quote(text)}"


def list_flag(flag: str, entries: Iterable[DatasetEntry]) -> str:
    """Return the flag ``flag``, such as ``dataset``, with a list of these data sets, without what is so by default."""
    usual_split = "test" if flag == "eval_dataset" else "train"
    shown = []
    for entry in entries:
        usual = DatasetEntry(path=entry.path).filled(None, usual_split, {})
        values = {key: "" if key == "name" else None for key, value in entry if value == getattr(usual, key)}
        shown.append(entry.model_copy(update={key: value for key, value in values.items() if key != "path"}))
    return flag_of_list(flag, shown)


@dataclass(frozen=True)
class Listed:
    """One data set of those that a flag names."""

    flag: str  # dataset, or eval_dataset
    entries: tuple[DatasetEntry, ...]  # all of the flag
    number: int  # of this data set among them
    is_alone: bool  # no other data set of the run is known to need another mapping
    keeps_objective: bool = False  # other data sets to train on hold what the objective learns from

    def with_columns(self, columns: Mapping[str, str]) -> str:
        """Return the flag that gives this data set a mapping of columns, and no other data set another one."""
        return columns_flag(columns) if self.is_alone else self._in_list(columns)

    def ignoring(self, columns: Mapping[str, str]) -> str:
        """Return the flag that gives a mapping which only ignores more: one list of columns may serve all data sets."""
        return columns_flag(columns) if len(self.entries) == 1 else self._in_list(columns)

    def left_out(self) -> str:
        """Return the flag that names all data sets but this one; empty if there is no other."""
        others = (*self.entries[: self.number], *self.entries[self.number + 1 :])
        return list_flag(self.flag, others) if others else ""

    def with_entry(self, entry: DatasetEntry) -> str:
        """Return the flag that names all its data sets, with ``entry`` in place of this one."""
        return list_flag(self.flag, (*self.entries[: self.number], entry, *self.entries[self.number + 1 :]))

    def _in_list(self, columns: Mapping[str, str]) -> str:
        return self.with_entry(self.entries[self.number].model_copy(update={"columns": dict(columns)}))
