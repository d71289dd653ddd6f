"""The labels of a classification: found in the training data, unless the recipe or the model names them."""

from collections.abc import Sequence

from kit.data.chat.formats import opened
from kit.data.kinds.classification import MULTI_HOT, label_names, label_numbers
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import Dataset
from kit.system.errors import UserError, listed


def find_labels(datasets: Sequence[Dataset], are_numbers: bool) -> tuple[list[str], bool]:
    """Return the names of all labels in training data, and whether a row may have several.

    Of regression (``are_numbers``) the names are 0, 1, ...: as many as the first row that can be read has numbers.

    Those of classes are in their order, then numbers in theirs, then others. Reads only their column. Rows that cannot
    be read are left to ``tokenise``.

    Raises:
        UserError: some rows have a list of labels and some do not, or all have the same ones.
    """
    classes: list[str] = []
    seen: set[frozenset[str]] = set()  # the labels of rows
    is_sure = True  # that these are all: every row could be read
    kinds: dict[bool, str] = {}  # where the first row is from of those with lists, and of those without
    for dataset in datasets:
        if dataset.is_evaluation or "label" not in dataset.fields:
            continue
        column, parts = dataset.fields["label"], dataset.source.parts
        classes += [name for part in parts for name in part.class_names(column)]
        for part, number, row in read_rows(parts, [name for name in dataset.columns if column.startswith(name)]):
            value = opened(row, [column]).get(column) if isinstance(row, dict) else None
            if value is None:
                continue
            try:
                if are_numbers:
                    return [str(i) for i in range(len(label_numbers(value)))], False
                found, is_list = label_names(value)
            except UserError:
                is_sure = False
                continue
            seen.add(frozenset(found))
            kinds.setdefault(is_list, dataset.source.origin(part, number))
    if len(kinds) == 2:
        raise UserError(f"{kinds[True]} label", f"a list, and at {kinds[False]} a label alone", "one of them")
    has_several = True in kinds
    names: frozenset[str] = frozenset().union(*seen)
    if len(seen) == 1 and is_sure:
        same = f"each row has {listed(sorted(names))}" if names else "no row has one"
        raise UserError("label", same, "rows that differ in it", MULTI_HOT if has_several else "")
    others = sorted(
        names.difference(classes), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )
    return [*dict.fromkeys(classes), *others], has_several
