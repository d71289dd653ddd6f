"""A data set of the recipe, opened: its source, and the columns of it that are read.

Imports no slow library, so that what is wrong with the files is reported at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.config.settings.objective import Rows
from kit.data.chat.columns import choose_fields
from kit.data.chat.columns_flag import Listed, columns_flag
from kit.data.chat.formats import IGNORE, format_of, to_sample
from kit.data.chat.unused import read_keys
from kit.data.chat.watched import is_watched
from kit.data.read.sources import Source, json_fix, open_source, read_rows
from kit.errors import Problem, Problems, UserError, raise_if


@dataclass(frozen=True)
class Dataset:
    """A data set of the recipe, opened."""

    entry: DatasetEntry
    source: Source
    fields: dict[str, str]  # the columns to read: our field to their column
    is_evaluation: bool = False
    among: Listed | None = None  # the data set among those of its flag; None: it is the only one

    @cached_property
    def ignored(self) -> frozenset[str]:
        """The columns, and keys of messages, that the user wants to be ignored."""
        return frozenset(theirs for theirs, ours in (self.entry.columns or {}).items() if ours == IGNORE)

    def columns_flag(self, more: Mapping[str, str]) -> str:
        """Return the flag that adds to the mapping of columns of this data set."""
        columns = {**(self.entry.columns or {}), **more}
        if not self.among:
            return columns_flag(columns)
        only_ignores = set(more.values()) == {IGNORE}
        return self.among.ignoring(columns) if only_ignores else self.among.with_columns(columns)

    @property
    def key(self) -> list[Any]:
        """What of the entry decides what is learned, for keys of the cache and fingerprints."""
        texts: list[Any] = [("prompt_format", self.entry.prompt_format)] if self.entry.prompt_format is not None else []
        texts += [("replace", *self.entry.replace.items())] if self.entry.replace else []
        return [*sorted(self.fields.items()), *read_keys(self.ignored), *texts]

    def sample(self, row: Mapping[str, Any], replaced: set[str] | None = None) -> dict[str, Any] | list[Problem]:
        """Convert a row to a sample, or return its problems. Adds to ``replaced`` the texts of ``replace`` in it."""
        return to_sample(row, self.fields, self.entry.prompt_format, self.entry.replace, replaced)

    def missing_texts(self, replaced: Collection[str]) -> list[str]:
        """Return the texts of ``replace`` that rows lack which have ``replaced`` of them."""
        return [old for old in self.entry.replace or () if old not in replaced]

    def problems_of_texts(self, replaced: Collection[str]) -> list[Problem]:
        """Return a problem if all rows together lack texts of ``replace``; they have ``replaced`` of them."""
        missing = self.missing_texts(replaced)
        if not missing:
            return []
        texts = self.entry.replace or {}
        left = {old: new for old, new in texts.items() if old in replaced}
        without = self.entry.model_copy(update={"replace": left or None})
        fix = f"correct it; or {self.among.with_entry(without)} leaves it out" if self.among else "correct it"
        found = f"replace: no row has {', '.join(map(repr, missing))}"
        return [Problem(self.source.name, found, "texts that stand in the rows", fix)]

    @cached_property
    def columns(self) -> list[str]:
        """The columns to read: those of the fields, and those that must not be ignored unseen."""
        watched = [name for name in self.source.columns if is_watched(name) and name not in self.ignored]
        return list(dict.fromkeys([*self.fields.values(), *watched]))


def open_datasets(
    entries: Sequence[DatasetEntry],
    eval_entries: Sequence[DatasetEntry],
    streaming: bool,
    wanted: Rows = "answers",
) -> list[Dataset]:
    """Open the data sets to train on, then those to evaluate on, and choose the columns to read.

    Args:
        streaming: training data of the hub are read over the network later instead of downloaded now.
        wanted: what the rows must hold for the objective.

    Raises:
        UserError: with the problems of all data sets.
    """
    opened: dict[int, Dataset] = {}
    problems = Problems()
    for i in range(len(entries)):
        with problems.caught():
            among = Listed("dataset", tuple(entries), i, is_alone=len(entries) == 1)
            opened[i] = _open_dataset(among, streaming, wanted)
    if problems and opened:  # another objective would not suit those that can be read, so it is not proposed
        problems = Problems()
        for i in sorted(set(range(len(entries))) - opened.keys()):
            with problems.caught():
                among = Listed("dataset", tuple(entries), i, is_alone=False, keeps_objective=True)
                opened[i] = _open_dataset(among, streaming, wanted)
    datasets = [opened[i] for i in sorted(opened)]
    is_alone = not datasets  # the training data need a mapping too, probably the same one
    for i in range(len(eval_entries)):
        with problems.caught():
            among = Listed("eval_dataset", tuple(eval_entries), i, is_alone, keeps_objective=not is_alone)
            datasets.append(_open_dataset(among, False, wanted, is_evaluation=True))
    # What is missing both to train and to evaluate on is reported once: to score, eval_dataset stands for both.
    last_of_each = {(problem.where.removeprefix("eval_"), problem.found): problem for problem in problems}
    raise_if(last_of_each.values())
    return datasets


def _open_dataset(among: Listed, streaming: bool, wanted: Rows, is_evaluation: bool = False) -> Dataset:
    """Open a data set, which is ``among`` those of its flag."""
    entry = among.entries[among.number]
    source = open_source(entry.path, entry.split or "", among.flag, entry.config, streaming, revision=entry.revision)
    rows = (row for _, _, row in read_rows(source.parts) if isinstance(row, dict))
    try:
        fields = choose_fields(source.columns, entry.columns or {}, source.name, is_evaluation, rows, among, wanted)
    except UserError as error:
        # A JSON file of a single object, which holds the rows.
        num_rows = sum(1 for _ in islice(read_rows(source.parts), 2))
        if num_rows == 1 and (fix := json_fix(source.parts, among.flag)):
            found = f"one object with {', '.join(source.columns)}"
            raise UserError(Problem(source.name, found, "a row for each sample", fix)) from None
        raise error
    if entry.prompt_format is not None and "instruction" not in fields:
        found = f"prompt_format, but no column is read as instruction: its rows have {format_of(fields)}"
        without = entry.model_copy(update={"prompt_format": None})
        fix = f"{among.with_entry(without)} reads them as they are"
        raise UserError(Problem(source.name, found, "rows with an instruction, or a column mapped to it", fix))
    return Dataset(entry, source, fields, is_evaluation, among)
