"""Log-probabilities of whole completions, by the policy and by the reference model (the initial policy).

New adapters leave the base weights unchanged, so the reference model is the policy with its adapters switched off.
Where the weights change, its log-probabilities are computed before the first step (``kit.train.precompute``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kit.data.feed.batches import on_device
from kit.strategy.float64 import in_float64

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.strategy.accelerator import Prepared


def sequence_logps(losses: torch.Tensor, micro_batch: "MicroBatch") -> torch.Tensor:
    """Return the log-probability of each sequence of a micro-batch, float64 [n].

    That is the sum of the log-probabilities of its targets, each times its weight: with weights of 0 and 1 the
    logarithm of the probability of the supervised tokens.

    Args:
        losses: float32 [S], the cross-entropy of each target in nats.
    """
    return by_sequence(-in_float64(losses) * in_float64(micro_batch.weights), micro_batch)


def sequence_weights(micro_batch: "MicroBatch") -> torch.Tensor:
    """Return the sum of the weights of each sequence's targets, float64 [n]: usually their number."""
    return by_sequence(in_float64(micro_batch.weights), micro_batch)


def by_sequence(values: torch.Tensor, micro_batch: "MicroBatch") -> torch.Tensor:
    """Return the sums of values of the targets, float64 [S], over each sequence, float64 [n].

    A product, because its sums have one order on a GPU."""
    assert micro_batch.sequence_ids is not None
    num_sequences = len(micro_batch.segments)
    # Without sequences, as on a rank without pairs, there is still a graph for the backward pass.
    belongs = F.one_hot(micro_batch.sequence_ids, max(1, num_sequences))
    return (in_float64(belongs).to(values).T @ values)[:num_sequences]


@contextmanager
def without_gradients(prepared: "Prepared") -> Iterator[None]:
    """In the ``with`` block, the model runs in evaluation mode without gradients."""
    was_training = prepared.model.training
    prepared.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        prepared.model.train(was_training)


def with_references(prepared: "Prepared", micro_batches: Sequence["MicroBatch"]) -> list["MicroBatch"]:
    """Return micro-batches with the reference's log-probabilities; those that lack them are run. Called by all ranks.

    All ranks must give the same number of micro-batches, and either all of them know their reference or none.
    """
    if all("references" in micro_batch.per_sequence for micro_batch in micro_batches):
        return list(micro_batches)
    known = []
    with prepared.reference(), without_gradients(prepared):
        for micro_batch in on_device(micro_batches, prepared.accelerator.device):
            losses = prepared.model(**micro_batch.model_inputs())
            known.append(micro_batch.with_per_sequence(references=sequence_logps(losses, micro_batch)))
    return known
