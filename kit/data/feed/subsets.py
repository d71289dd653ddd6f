"""Subsets of samples: drawn at random, held out for evaluation, or the first ones only.

Promises: each choice depends only on the data and the recipe, so it is the same on every rank; a note says what is left
out; no dataset is left without a sample to train on.
"""

from collections.abc import Sequence

import numpy as np

from kit.data.feed.order import DRAW, SPLIT, permutation
from kit.data.samples.samples import Samples, duplicates
from kit.system.errors import UserError


def drawn(samples: Samples, limits: Sequence[float | None], seed: int, notes: list[str]) -> Samples:
    """Draw rows of datasets, and add a note for each. What is drawn of a dataset depends on ``seed`` and its size.

    Args:
        limits: of each dataset the number of rows; below 1 a fraction, rounded; None: all.
    """
    if not any(limits):
        return samples
    rows, is_used = samples.rows(), np.ones(len(samples), bool)
    for dataset_id, limit in enumerate(limits):
        of_dataset = samples.dataset_ids == dataset_id
        if limit is None or not of_dataset.any():
            continue
        first, last = rows[of_dataset][[0, -1]]  # rows of a dataset follow one another
        num_rows = int(last - first) + 1
        num = int(limit) if limit >= 1 else max(1, round(limit * num_rows))
        used = _is_first(permutation(num_rows, seed, DRAW), min(num, num_rows))
        is_used[of_dataset] = used[rows[of_dataset] - first]
        notes.append(f"{samples.dataset_names[dataset_id]}: {used.sum()} of {num_rows} rows drawn by seed {seed}")
    if is_used.all():
        return samples
    return samples.select(np.flatnonzero(is_used), f"drawn {list(limits)} seed {seed}")


def hold_out(samples: Samples, size: float, seed: int, notes: list[str]) -> tuple[Samples, Samples]:
    """Split off evaluation samples. Whole rows are held out, so the samples of one row stay on the same side.

    Args:
        size: the number of rows to hold out; below 1 a fraction.

    Returns:
        The samples to train on, and those held out.

    Raises:
        UserError: nothing would be held out, or nothing of a dataset left to train on.
    """
    rows = samples.rows()
    num_rows = int(rows.max()) + 1
    num = int(size) if size >= 1 else round(size * num_rows)
    if not 0 < num < num_rows:
        found = f"{size:g} of {num_rows} samples leaves nothing to {'train on' if num else 'evaluate on'}"
        fix = "another --eval_split_size, or an --eval_dataset of its own"
        raise UserError("eval_split_size", found, "some samples on each side", fix)
    is_held_out = _is_first(permutation(num_rows, seed, SPLIT), num)[rows]
    reason = f"split {num} seed {seed}"
    train = samples.select(np.flatnonzero(~is_held_out), f"{reason} rest")
    _check_all_used(samples, train, "eval_split_size")
    evaluation = samples.select(np.flatnonzero(is_held_out), f"{reason} held out")
    notes.append(f"{len(evaluation)} samples held out for evaluation, {len(train)} left to train on")
    return train, evaluation


def limited(samples: Samples, num: int | None, purpose: str, notes: list[str]) -> Samples:
    """Select the first ``num`` samples; of several datasets, ``num`` spread over all. Adds a note that says which.

    Args:
        purpose: ``training`` or ``evaluation``.
    """
    total = len(samples)
    if num is None or num >= total:
        return samples
    if len(samples.stores) > 1:
        notes.append(f"{purpose} on {num} of {total} samples, spread over all datasets")
        chosen = np.linspace(0, total - 1, num).round().astype(np.int64)
    else:
        notes.append(f"{purpose} on the first {num} of {total} samples")
        chosen = np.arange(num)
    selected = samples.select(chosen, f"first {num}")
    if purpose == "training":
        _check_all_used(samples, selected, "max_train_samples")
    return selected


def _check_all_used(before: Samples, after: Samples, setting: str) -> None:
    """Raise ``UserError`` if a dataset has samples in ``before``, but none in ``after``, because of ``setting``."""
    for dataset_id in np.setdiff1d(before.dataset_ids, after.dataset_ids):
        found = f"nothing of {before.dataset_names[dataset_id]} is left to train on"
        fix = "leave that dataset out, or take more samples"
        raise UserError(setting, found, "some samples of each dataset", fix)


def leak_notes(train: Samples, evaluation: Samples | None) -> list[str]:
    """Return a warning that counts the evaluation samples that are in the training data; nothing if there are none."""
    if evaluation is None:
        return []
    num = duplicates(evaluation, train)
    return [f"warning: {num} of {len(evaluation)} evaluation samples are in the training data"] if num else []


def _is_first(order: np.ndarray, num: int) -> np.ndarray:
    """Whether each row is among the first ``num`` of ``order``, bool [number of rows]."""
    is_first = np.zeros(len(order), bool)
    is_first[order[:num]] = True
    return is_first
