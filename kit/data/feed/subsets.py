"""Which of the samples a run uses: without repeats, without those held out for evaluation, or the first ones only.

Promises: each choice depends only on the data and the recipe, so it is the same on every rank; a note says what is left
out.
"""

import numpy as np

from kit.config.recipe import Recipe
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
    for number in set(train.sources.tolist()) - set(kept.sources.tolist()):
        found = f"all samples of {train.names[number]} are in the data sets before it"
        raise UserError(Problem("dedup", found, "some of each data set to train on", "leave out that data set"))
    return kept


def limited_evaluation(evaluation: Samples | None, recipe: Recipe, notes: list[str]) -> Samples | None:
    """Select ``max_eval_samples`` evaluation samples, and add a note that says which."""
    return evaluation and _first(evaluation, recipe.max_eval_samples, "evaluation", notes)


def limited_training(train: Samples, recipe: Recipe, notes: list[str]) -> Samples:
    """Select ``max_train_samples`` training samples, and add a note that says which.

    Raises:
        UserError: a data set would give none.
    """
    chosen = _first(train, recipe.max_train_samples, "training", notes)
    for number in set(train.sources.tolist()) - set(chosen.sources.tolist()):
        found = f"{recipe.max_train_samples} of {len(train)} samples takes none of {train.names[number]}"
        fix = "raise it, or leave out that data set"
        raise UserError(Problem("max_train_samples", found, "some of each data set to train on", fix))
    return chosen


def _first(samples: Samples, num: int | None, purpose: str, notes: list[str]) -> Samples:
    """Select the first ``num`` samples; of several data sets, as many spread over all. Adds a note that says which."""
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
    """Split off evaluation samples. Whole rows are held out, so the samples of one row stay on the same side."""
    rows = samples.rows()
    num_rows = int(rows.max()) + 1
    if num_rows < 2:
        fix = "give an eval_dataset, or do without evaluation"
        raise UserError(Problem("eval_split_size", "a single sample cannot be split", "at least two", fix))
    num_held_out = int(size) if size >= 1 else round(size * num_rows)
    if not 0 < num_held_out < num_rows:
        found = f"{size:g} of {num_rows} samples leaves nothing to {'train on' if num_held_out else 'evaluate on'}"
        raise UserError(Problem("eval_split_size", found, f"1 to {num_rows - 1} samples, or a share that gives that"))
    held_out = np.isin(rows, permutation(num_rows, seed, SPLIT)[:num_held_out])
    reason = f"split {num_held_out} seed {seed}"
    rest, chosen = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    for number in set(samples.sources.tolist()) - set(samples.sources[rest].tolist()):
        found = f"{size:g} takes all of {samples.names[number]}"
        raise UserError(Problem("eval_split_size", found, "some of each data set left to train on"))
    return samples.select(rest, f"{reason} rest"), samples.select(chosen, f"{reason} held out")
