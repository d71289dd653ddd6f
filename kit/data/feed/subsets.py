"""Which of the samples a run uses: some that are drawn, no repeats, none of those held out, or the first ones only.

Promises: each choice depends only on the data and the recipe, so it is the same on every rank; a note says what is left
out.
"""

from collections.abc import Sequence

import numpy as np

from kit.data.feed.order import DRAW, SPLIT, permutation
from kit.data.samples.samples import Samples, duplicates
from kit.errors import Problem, UserError


def drawn(samples: Samples, limits: Sequence[float | None], seed: int, notes: list[str]) -> Samples:
    """Draw rows of data sets, and add a note for each. What is drawn of a data set depends on ``seed`` and its size.

    Args:
        limits: of each data set the number of rows; below 1 their share, rounded; None: all.
    """
    if not any(limits):
        return samples
    rows, is_used = samples.rows(), np.ones(len(samples), bool)
    for dataset_id, limit in enumerate(limits):
        of_dataset = samples.dataset_ids == dataset_id
        if limit is None or not of_dataset.any():
            continue
        first, last = rows[of_dataset][[0, -1]]  # rows of a data set follow one another
        num_rows = int(last - first) + 1
        num = int(limit) if limit >= 1 else max(1, round(limit * num_rows))
        used = _is_first(permutation(num_rows, seed, DRAW), min(num, num_rows))
        is_used[of_dataset] = used[rows[of_dataset] - first]
        notes.append(f"{samples.dataset_names[dataset_id]}: {used.sum()} of {num_rows} rows drawn by seed {seed}")
    if is_used.all():
        return samples
    return samples.select(np.flatnonzero(is_used), f"drawn {list(limits)} seed {seed}")


def without_repeats(train: Samples, notes: list[str]) -> Samples:
    """Leave out samples with the same ids and weights as an earlier one, over all data sets. Adds a note.

    Raises:
        UserError: nothing of a data set would be left.
    """
    repeats = train.repeats()
    num = int(repeats.sum())
    notes.append(f"dedup: {num} of {len(train)} samples left out: an earlier one has the same tokens and mask")
    if not num:
        return train
    kept = train.select(np.flatnonzero(~repeats), "without repeats")
    for name in _missing(train, kept):
        found = f"all samples of {name} are in the data sets before it"
        raise UserError(Problem("dedup", found, "some of each data set to train on", "leave out that data set"))
    return kept


def limited_evaluation(evaluation: Samples | None, max_samples: int | None, notes: list[str]) -> Samples | None:
    """Select ``max_samples`` evaluation samples, and add a note that says which."""
    return None if evaluation is None else _first(evaluation, max_samples, "evaluation", notes)


def limited_training(train: Samples, max_samples: int | None, notes: list[str]) -> Samples:
    """Select ``max_samples`` training samples, and add a note that says which.

    Raises:
        UserError: a data set would give none.
    """
    chosen = _first(train, max_samples, "training", notes)
    for name in _missing(train, chosen):
        found = f"{max_samples} of {len(train)} samples takes none of {name}"
        fix = f"--max_train_samples {_enough(train)}, or leave that data set out"
        raise UserError(Problem("max_train_samples", found, "some of each data set to train on", fix))
    return chosen


def _enough(samples: Samples) -> int:
    """The smallest number of samples, spread over all, that takes some of each data set."""
    nums = range(len(samples.stores), len(samples) + 1)
    return next(num for num in nums if len(set(samples.dataset_ids[_spread(num, len(samples))])) == len(samples.stores))


def _spread(num: int, total: int) -> np.ndarray:
    """The numbers of ``num`` samples that are spread evenly over ``total``."""
    return np.linspace(0, total - 1, num).round().astype(np.int64)


def _first(samples: Samples, num: int | None, purpose: str, notes: list[str]) -> Samples:
    """Select the first ``num`` samples; of several data sets, ``num`` spread over all. Adds a note that says which."""
    total = len(samples)
    if num is None or num >= total:
        return samples
    if len(samples.stores) > 1:
        notes.append(f"{purpose} on {num} of {total} samples, spread over all data sets")
        chosen = _spread(num, total)
    else:
        notes.append(f"{purpose} on the first {num} of {total} samples")
        chosen = np.arange(num)
    return samples.select(chosen, f"first {num}")


def _missing(before: Samples, after: Samples) -> list[str]:
    """The names of the data sets that have samples in ``before``, but none in ``after``."""
    missing = np.setdiff1d(before.dataset_ids, after.dataset_ids)
    return [before.dataset_names[dataset_id] for dataset_id in missing]


def leak_notes(train: Samples, evaluation: Samples | None) -> list[str]:
    """Return a warning that counts the evaluation samples that are in the training data; nothing if there are none."""
    if evaluation is None:
        return []
    exact, similar = duplicates(evaluation, train)
    if not exact and not similar:
        return []
    found = f"{exact} token for token, {similar} but for case, spacing and punctuation"
    return [f"warning: {exact + similar} of {len(evaluation)} evaluation samples are in the training data: {found}"]


def hold_out(samples: Samples, size: float, seed: int) -> tuple[Samples, Samples]:
    """Split off evaluation samples. Whole rows are held out, so the samples of one row stay on the same side.

    Args:
        size: the number of rows to hold out; below 1 their share.

    Returns:
        The samples to train on, and those held out.

    Raises:
        UserError: nothing would be held out, or nothing of a data set left to train on.
    """
    rows = samples.rows()
    num_rows = int(rows.max()) + 1
    if num_rows < 2:
        fix = "leave --eval_split_size out, or give an --eval_dataset instead"
        raise UserError(Problem("eval_split_size", "a single sample cannot be split", "at least two", fix))
    num_held_out = int(size) if size >= 1 else round(size * num_rows)
    if not 0 < num_held_out < num_rows:
        found = f"{size:g} of {num_rows} samples leaves nothing to {'train on' if num_held_out else 'evaluate on'}"
        fix = f"--eval_split_size {max(1, num_rows // 10)} holds out as many samples"
        raise UserError(
            Problem("eval_split_size", found, f"1 to {num_rows - 1} samples, or a share that gives that", fix)
        )
    order = permutation(num_rows, seed, SPLIT)
    reason = f"split {num_held_out} seed {seed}"
    held_out = _is_first(order, num_held_out)[rows]
    train = samples.select(np.flatnonzero(~held_out), f"{reason} rest")
    for name in _missing(samples, train):
        found = f"{size:g} takes all of {name}"
        raise UserError(
            Problem("eval_split_size", found, "some of each data set left to train on", _smaller(samples, rows, order))
        )
    return train, samples.select(np.flatnonzero(held_out), f"{reason} held out")


def _is_first(order: np.ndarray, num: int) -> np.ndarray:
    """Whether each row is among the first ``num`` of ``order``, bool [number of rows]."""
    is_first = np.zeros(len(order), bool)
    is_first[order[:num]] = True
    return is_first


def _smaller(samples: Samples, rows: np.ndarray, order: np.ndarray) -> str:
    """The fix for a share that takes all of a data set: the largest number of rows, of few, that does not."""
    num = len(order) // 2
    while num and len(set(samples.dataset_ids[~_is_first(order, num)[rows]])) < len(samples.stores):
        num //= 2
    return f"--eval_split_size {num} leaves some of each" if num else "leave that data set out"
