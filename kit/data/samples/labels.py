"""The labels of a classification: found in the training data, unless the recipe or the model names them."""

from collections.abc import Sequence

from kit.data.chat.formats import opened
from kit.data.chat.judged import label_names
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import Dataset
from kit.errors import Problem, UserError


def find_labels(datasets: Sequence[Dataset]) -> tuple[list[str], bool]:
    """Return the names of all labels in training data, numbers in their order, and whether a row may have several.

    Reads only their column. Rows that cannot be read are left to ``tokenise``.

    Raises:
        UserError: some rows have a list of labels and some do not, or all have the same label or none.
    """
    names: set[str] = set()
    kinds: dict[bool, str] = {}  # where the first row is from of those with lists, and of those without
    for dataset in datasets:
        if dataset.is_evaluation or "label" not in dataset.fields:
            continue
        column, parts = dataset.fields["label"], dataset.source.parts
        for part, number, row in read_rows(parts, [name for name in dataset.columns if column.startswith(name)]):
            value = opened(row, [column]).get(column) if isinstance(row, dict) else None
            if value is None:
                continue
            try:
                found, is_list = label_names(value)
            except UserError:
                continue
            names.update(found)
            kinds.setdefault(is_list, dataset.source.origin(part, number))
    if len(kinds) == 2:
        raise UserError(Problem(f"{kinds[True]} label", f"a list, and at {kinds[False]} a label alone", "one of them"))
    has_several = True in kinds
    if kinds and not names:
        raise UserError(Problem("label", "no row has one", "lists that are not all empty"))
    if kinds and not has_several and len(names) == 1:
        raise UserError(Problem("label", f"each row has the label {min(names)}", "at least two, to tell apart"))
    return sorted(
        names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    ), has_several
