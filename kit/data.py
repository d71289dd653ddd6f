"""What a run trains and evaluates on, in which order, in which batches.

Promises:

- ``open_data`` reports everything that is wrong with the data at once, before any weight is read.
- The order is a pure function of (seed, step): no sampler, no state, nothing to save. The number of processes and
  the micro-batch size only decide who computes which part of a step.
- Every global batch is full, so a run that is extended goes on exactly where it ended.
- All ranks have equally many micro-batches, so that their collectives match; where the samples of a global batch or
  of an evaluation do not suffice, a rank gets a batch without targets. No sample is repeated to fill up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kit.chat import resolve_template
from kit.config import Recipe
from kit.errors import Problem, Problems, UserError
from kit.samples import Samples, tokenise
from kit.sources import Source, choose_fields, open_source

# Takes the place of an epoch's number in the key of the evaluation split: no epoch ever has it.
SPLIT_STREAM = 2**64 - 1

# Tensors of one micro-batch of B samples, S of whose tokens are supervised, padded on the right to T tokens:
#   input_ids [B, T] int64, attention_mask [B, T] int64,
#   target_positions [S] int64: b * T + t of the hidden states that predict a supervised token,
#   targets [S] int64: those tokens.
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Data:
    """``notes`` are lines for the user; ``chat_template`` is the one to save with the model."""

    train: Samples
    evaluation: Samples | None
    chat_template: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Of what is trained on; a run may go on with other evaluation data."""
        return self.train.fingerprint

    def describe(self) -> dict[str, Any]:
        """For the record of a run."""
        evaluation = self.evaluation and {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        return {"fingerprint": self.fingerprint, "train": self.train.report, "evaluation": evaluation}


Sources = list[tuple[Source, dict[str, str]]]  # training data, then evaluation data if it has its own


def open_sources(recipe: Recipe) -> Sources:
    """Find what ``recipe`` names and which columns count. Raises ``UserError`` with the problems of both data sets."""
    wanted = [("dataset", recipe.dataset, recipe.dataset_split)]
    if recipe.eval_dataset is not None:
        wanted.append(("eval_dataset", recipe.eval_dataset, recipe.eval_dataset_split))
    problems, sources = Problems(), []
    for flag, name, split in wanted:
        with problems.caught():
            source = open_source(name, split, flag)
            sources.append((source, choose_fields(source, recipe.dataset_columns, flag == "eval_dataset")))
    problems.raise_if_any()
    return sources


def open_data(recipe: Recipe, sources: Sources, tokenizer: Any, vocab_size: int, show_progress: bool = False) -> Data:
    """Read, validate and tokenise ``sources``, or take them from the cache.

    ``vocab_size``: rows of the model's embedding. ``show_progress``: draw a bar if standard error is a terminal.
    Raises ``UserError`` with all problems of both data sets.
    """
    template = resolve_template(tokenizer, recipe.chat_template)
    problems, opened, notes = Problems(), [], []
    if recipe.predict_with_generate and "text" in sources[-1][1]:
        found = f"{sources[-1][0].name} is plain text, which asks nothing"
        problems.append(Problem("predict_with_generate", found, "messages, or prompt and completion"))
    for source, fields in sources:
        with problems.caught():
            as_chat = recipe.chat_template is not None
            samples = tokenise(source, fields, tokenizer, template, as_chat, recipe.max_length, show_progress)
            if samples.max_id >= vocab_size:
                found = f"token id {samples.max_id}, but the model has {vocab_size} embeddings"
                fix = "use the tokenizer that belongs to the model"
                raise UserError(Problem(source.name, found, "ids below it", fix))
            opened.append(samples)
            notes += samples.notes(recipe.max_length)
    if pad_id(tokenizer) >= vocab_size:
        found = f"its pad token has id {pad_id(tokenizer)}, but the model has {vocab_size} embeddings"
        fix = "take pad_token out of tokenizer_config.json: padding is masked, any id serves"
        problems.append(Problem("model_name_or_path", found, fix=fix))
    problems.raise_if_any()
    train, evaluation = opened[0], opened[1] if len(opened) > 1 else None
    if recipe.eval_split_size:
        train, evaluation = _hold_out(train, recipe.eval_split_size, recipe.seed)
        notes.append(f"{len(evaluation)} samples held out for evaluation, {len(train)} left to train on")
    if evaluation and recipe.max_eval_samples and recipe.max_eval_samples < len(evaluation):
        notes.append(f"evaluation on the first {recipe.max_eval_samples} of {len(evaluation)} samples")
        evaluation = evaluation.select(np.arange(recipe.max_eval_samples), f"first {recipe.max_eval_samples}")
    if len(train) < recipe.global_batch_size:
        few = f"{len(train)} samples are fewer than global_batch_size {recipe.global_batch_size}"
        notes.append(f"{few}: every step sees some of them more than once")
    counts = f"{len(train)} samples, {train.lengths.sum()} tokens, {train.num_supervised.sum()} of them supervised"
    return Data(train, evaluation, template, [f"training data: {counts}", *notes])


def _hold_out(samples: Samples, size: float, seed: int) -> tuple[Samples, Samples]:
    if len(samples) < 2:
        fix = "give an eval_dataset, or do without evaluation"
        raise UserError(Problem("eval_split_size", "a single sample cannot be split", "at least two", fix))
    num_held_out = int(size) if size >= 1 else round(size * len(samples))
    if not 0 < num_held_out < len(samples):
        found = f"{size:g} of {len(samples)} samples leaves nothing to {'train on' if num_held_out else 'evaluate on'}"
        raise UserError(
            Problem("eval_split_size", found, f"1 to {len(samples) - 1} samples, or a share that gives that")
        )
    order = _permutation(len(samples), seed, SPLIT_STREAM)
    reason = f"split {num_held_out} seed {seed}"
    held_out, rest = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
    return samples.select(rest, f"{reason} rest"), samples.select(held_out, f"{reason} held out")


def pad_id(tokenizer: Any) -> int:
    """The id to pad with. Which one is of no consequence: padding is masked by position."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


@lru_cache(maxsize=2)  # a step may lie across two epochs; where it spans more, they come one after another
def _permutation(num_samples: int, seed: int, stream: int) -> np.ndarray:
    """int64 [num_samples]. Sorts raw words of the generator: numpy guarantees those, not its shuffling, for ever."""
    words = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(words, kind="stable")


def total_steps(num_samples: int, recipe: Recipe) -> int:
    """Optimiser steps of a whole run: ``max_steps``, or as many full ones as the epochs need."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    # As the decimal that was written: in binary 1.1 epochs of 10 samples would be more than 11 samples.
    return math.ceil(Fraction(str(recipe.num_train_epochs)) * num_samples / recipe.global_batch_size)


def sample_ids(step: int, num_samples: int, recipe: Recipe) -> list[int]:
    """The global batch of ``step`` (from 0): indices of its samples, the same on any topology.

    Slot s is place s % num_samples of epoch s // num_samples, each with its own permutation. A batch runs on across
    the end of an epoch, the last one of a run too: where a run ends does not change any of its batches.
    """
    first = step * recipe.global_batch_size
    places = [divmod(slot, num_samples) for slot in range(first, first + recipe.global_batch_size)]
    return [int(_permutation(num_samples, recipe.seed, epoch)[place]) for epoch, place in places]


def micro_batches(
    samples: Samples,
    ids: Sequence[int],
    process_index: int,
    num_processes: int,
    micro_batch_size: int,
    pad_token_id: int,
) -> list[Batch]:
    """This rank's share of the global batch ``ids``: ceil(len(ids) / (ranks * size)) batches, as on every rank."""
    return list(_deal(samples, ids, process_index, num_processes, micro_batch_size, pad_token_id))


def evaluation_batches(
    samples: Samples, process_index: int, num_processes: int, micro_batch_size: int, pad_token_id: int
) -> Iterator[Batch]:
    """This rank's share of all samples, each of them on exactly one rank; equally many batches on every rank."""
    return _deal(samples, range(len(samples)), process_index, num_processes, micro_batch_size, pad_token_id)


def _deal(
    samples: Samples, ids: Sequence[int], process_index: int, num_processes: int, size: int, pad_token_id: int
) -> Iterator[Batch]:
    # Longest first: similar lengths meet in a batch and on all ranks at a time, and memory peaks at once or never.
    order = np.array(ids)[np.argsort(-samples.lengths[ids], kind="stable")]
    for first in range(0, len(order), num_processes * size):
        shares = np.array_split(order[first : first + num_processes * size], num_processes)
        yield collate(samples, shares[process_index].tolist(), pad_token_id)


def collate(samples: Samples, ids: Sequence[int], pad_token_id: int) -> Batch:
    """Samples as tensors, see ``Batch``. Without ``ids``: one token that nothing attends to and no target."""
    pairs = [samples[i] for i in ids]
    length = max((len(tokens) for tokens, _ in pairs), default=1)
    input_ids = np.full((max(len(pairs), 1), length), pad_token_id, np.int64)
    attention_mask = np.zeros_like(input_ids)
    supervised = np.zeros_like(input_ids, dtype=bool)
    for row, (tokens, mask) in enumerate(pairs):
        input_ids[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
        supervised[row, : len(tokens)] = mask
    if not pairs:
        attention_mask[:] = 1  # softmax over nothing is NaN, and so would be the gradients
    rows, columns = np.nonzero(supervised[:, 1:])
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "target_positions": torch.from_numpy(rows * length + columns),
        "targets": torch.from_numpy(input_ids[rows, columns + 1]),
    }


def prompt_and_reference(samples: Samples, i: int) -> tuple[list[int], list[int]]:
    """Ids before the last supervised run of sample ``i``, and that run: what to ask, and the answer to expect."""
    tokens, mask = samples[i]
    end = int(np.flatnonzero(mask)[-1]) + 1
    start = int(np.flatnonzero(mask[:end] == 0)[-1]) + 1 if not mask[:end].all() else 0
    return tokens[:start].tolist(), tokens[start:end].tolist()
