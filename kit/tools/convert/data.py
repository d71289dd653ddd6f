"""Data sets of a recipe, from those of another kit."""

from typing import Any

from kit.config.dataset_entry import DatasetEntry, with_own_names
from kit.tools.convert.draft import Draft


def entry(path: Any, columns: dict[str, str] | None = None, split: Any = None, **more: Any) -> DatasetEntry:
    """One data set. ``columns`` maps a column to the kit's field; one that has the field's name is left out."""
    columns = {theirs: ours for theirs, ours in (columns or {}).items() if theirs != ours}
    return DatasetEntry(path=str(path), columns=columns or None, split=None if split == "train" else split, **more)


def put_data(draft: Draft, name: str, entries: list[DatasetEntry]) -> None:
    """Set ``dataset`` or ``eval_dataset``: by single settings if it is one, else as a list."""
    if not entries:
        return
    first = entries[0]
    if name == "eval_dataset" and len(entries) == 1 and first.split is None:
        first = first.model_copy(update={"split": "train"})  # the default of eval_dataset_split is test
    needs_list = first.prompt_format is not None or first.max_samples is not None
    if len(entries) > 1 or needs_list or (name == "eval_dataset" and first.columns):
        draft.put(name, [each.as_written() for each in with_own_names([first, *entries[1:]])])
        return
    draft.put(name, first.path)
    for key in ("config", "split", "revision"):
        if value := getattr(first, key):
            draft.put(f"{name}_{key}", value)
    if first.columns:
        draft.put("dataset_columns", first.columns)
