"""A data set of the recipe, opened: its source, and the columns of it that are read."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kit.config.dataset_entry import DatasetEntry
from kit.data.chat.formats import IGNORE
from kit.data.chat.unused import read_keys
from kit.data.chat.watched import is_watched
from kit.data.read.sources import Source


@dataclass(frozen=True)
class Dataset:
    """A data set of the recipe, opened."""

    entry: DatasetEntry
    source: Source
    fields: dict[str, str]  # the columns to read: our field to their column
    is_evaluation: bool = False

    @cached_property
    def ignored(self) -> frozenset[str]:
        """The columns, and keys of messages, that the user wants to be ignored."""
        return frozenset(theirs for theirs, ours in (self.entry.columns or {}).items() if ours == IGNORE)

    @property
    def key(self) -> list[Any]:
        """What of the columns decides what is learned, for keys of the cache and fingerprints."""
        return [*sorted(self.fields.items()), *read_keys(self.ignored)]

    @cached_property
    def columns(self) -> list[str]:
        """The columns to read: those of the fields, and those that must not be ignored unseen."""
        watched = [name for name in self.source.columns if is_watched(name) and name not in self.ignored]
        return list(dict.fromkeys([*self.fields.values(), *watched]))
