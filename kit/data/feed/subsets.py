"""Which of the samples a run uses: without repeats, without those held out for evaluation, or the first ones only.

Promises: each choice depends only on the data and the recipe, so it is the same on every rank; a note says what is left
out.
"""

import numpy as np

from kit.data.feed.order import SPLIT, permutation
from kit.data.samples.samples import Samples, duplicates
from kit.errors import Problem, UserError


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
        fix = "raise it, or leave out that data set"
        raise UserError(Problem("max_train_samples", found, "some of each data set to train on", fix))
    return chosen


def _first(samples: Samples, num: int | None, purpose: str, notes: list[str]) -> Samples:
    """Select the first ``num`` samples; of several data sets, ``num`` spread over all. Adds a note that says which."""
    total = len(samples)
    if num is None or num >= total:
        return samples
    if len(samples.stores) > 1:
        notes.append(f"{purpose} on {num} of {total} samples, spread over all data sets")
        chosen = np.linspace(0, total - 1, num).round().astype(np.int64)
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
        fix = "give an eval_dataset, or do without evaluation"
        raise UserError(Problem("eval_split_size", "a single sample cannot be split", "at least two", fix))
    num_held_out = int(size) if size >= 1 else round(size * num_rows)
    if not 0 < num_held_out < num_rows:
        found = f"{size:g} of {num_rows} samples leaves nothing to {'train on' if num_held_out else 'evaluate on'}"
        raise UserError(Problem("eval_split_size", found, f"1 to {num_rows - 1} samples, or a share that gives that"))
    is_held_out = np.zeros(num_rows, bool)
    is_held_out[permutation(num_rows, seed, SPLIT)[:num_held_out]] = True
    held_out = is_held_out[rows]
    reason = f"split {num_held_out} seed {seed}"
    train = samples.select(np.flatnonzero(~held_out), f"{reason} rest")
    for name in _missing(samples, train):
        found = f"{size:g} takes all of {name}"
        raise UserError(Problem("eval_split_size", found, "some of each data set left to train on"))
    return train, samples.select(np.flatnonzero(held_out), f"{reason} held out")
