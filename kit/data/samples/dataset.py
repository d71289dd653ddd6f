"""A dataset of the recipe, opened: its source, and the columns of it that are read.

Imports no slow library, so that problems of the files are reported at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.data.chat.formats import IGNORE, Format, to_sample
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.unused import COLUMNS, read_keys
from kit.data.kinds.answers import AnswerRows
from kit.data.kinds.columns import choose_fields
from kit.data.kinds.kind import RowKind
from kit.data.read.sources import Source, open_source
from kit.system.errors import Problem, Problems, UserError, raise_if


@dataclass(frozen=True)
class Dataset:
    """A dataset of the recipe, opened."""

    entry: DatasetEntry
    source: Source
    format: Format
    fields: dict[str, str]  # the columns to read: our field to their column
    is_evaluation: bool = False

    @cached_property
    def ignored(self) -> frozenset[str]:
        """The columns, and keys of messages, that the user wants to be ignored."""
        return frozenset(theirs for theirs, ours in (self.entry.columns or {}).items() if ours == IGNORE)

    @property
    def key(self) -> list[Any]:
        """The settings of the entry that change the training, for keys of the cache and fingerprints."""
        wording = [("prompt_format", self.entry.prompt_format)] if self.entry.prompt_format is not None else []
        # Media that rows have are known by their content.
        fields = [each for each in self.fields.items() if not (each[0] == each[1] and each[0] in MEDIA_COLUMNS)]
        return [*sorted(fields), *read_keys(self.ignored), *wording]

    def sample(self, row: Mapping[str, Any]) -> dict[str, Any] | list[Problem]:
        """Convert a row to a sample, or return its problems."""
        return to_sample(row, self.fields, self.format, self.entry.prompt_format)

    @cached_property
    def columns(self) -> list[str]:
        """The columns to read: those of the fields, and those that must not be ignored unseen."""
        watched = [name for name in self.source.columns if name in COLUMNS and name not in self.ignored]
        whole = [name if name in self.source.columns else name.partition(".")[0] for name in self.fields.values()]
        return list(dict.fromkeys([*whole, *watched]))


def open_datasets(
    entries: Sequence[DatasetEntry],
    eval_entries: Sequence[DatasetEntry],
    streaming: bool,
    kind: type[RowKind] = AnswerRows,
    scores: bool = False,
    proposed: list[Problem] | None = None,
) -> list[Dataset]:
    """Open the datasets to train on, then those to evaluate on, and choose the columns to read.

    Args:
        streaming: training data of the hub are read over the network later instead of downloaded now.
        kind: the dataset type that the objective needs.
        scores: ``entries`` only stand for ``eval_entries``, to score a run whose names of columns are taken.
        proposed: see ``choose_fields``.

    Raises:
        UserError: with the problems of all datasets.
    """
    datasets: list[Dataset] = []
    problems = Problems()
    for entry in entries:
        with problems.caught():
            datasets.append(_open_dataset(entry, "dataset", streaming, kind, scores, proposed))
    for entry in eval_entries:
        with problems.caught():
            datasets.append(_open_dataset(entry, "eval_dataset", False, kind, True, proposed))
    # What is missing both to train and to evaluate on is reported once: to score, eval_dataset stands for both.
    last_of_each = {(problem.where.removeprefix("eval_"), problem.found): problem for problem in problems}
    raise_if(last_of_each.values())
    return datasets


def _open_dataset(
    entry: DatasetEntry,
    flag: str,
    streaming: bool,
    kind: type[RowKind],
    may_lack: bool,
    proposed: list[Problem] | None,
) -> Dataset:
    """Open a dataset that is named by ``flag``."""
    is_evaluation = flag == "eval_dataset"
    source = open_source(entry.path, entry.split or "", flag, entry.config, streaming, revision=entry.revision)
    fields = choose_fields(source.first_row, entry.columns or {}, source.name, may_lack, kind, proposed)
    format = kind.format_of(fields)
    if entry.prompt_format is not None and "instruction" not in fields:
        found = f"prompt_format, but no column is read as instruction: its rows have {format}"
        expected = "rows with an instruction, or a column mapped to it"
        raise UserError(source.name, found, expected, "leave prompt_format out of its entry")
    return Dataset(entry, source, format, fields, is_evaluation)
