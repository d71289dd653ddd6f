"""Objectives: how the losses of single tokens become the number that a step minimises, and its metrics.

``train_step`` takes any object with the three methods of ``Objective``. The number must be a sum over the targets of
the global batch, divided by a number that every rank knows before the step. Then it does not depend on how the batch is
divided into micro-batches and ranks. A mean of means would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.data.feed.feed import GlobalBatch


class Objective(Protocol):
    """What a step minimises: a sum over the targets of the global batch, divided by ``divisor``."""

    def divisor(self, batch: "GlobalBatch") -> float:
        """Return the number that divides the sum over the global batch; the same on every rank."""

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the part of one micro-batch.

        Args:
            losses: float32 [S], the model's cross-entropy of each target of ``micro_batch``, in nats.

        Returns:
            Its part of the sum, shape [], to be differentiated; and numbers for the metrics, float64 [n], detached,
            which are summed over the micro-batches of all ranks.
        """

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Compute the metrics of the step.

        Args:
            sums: the n numbers of ``terms``, summed over the global batch.

        Returns:
            The metrics by name; ``loss`` is the number that was minimised.
        """


@dataclass(frozen=True)
class SupervisedLoss:
    """Weighted cross-entropy in nats per supervised token; the weights are usually 1."""

    names: Sequence[str]  # of the data sets

    def divisor(self, batch: "GlobalBatch") -> float:
        """Return the sum of the weights of all targets."""
        return batch.target_weights.sum()

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the weighted losses, and the same sum for each data set."""
        weighted = losses * micro_batch.weights  # [S]
        by_source = weighted.detach().double() @ F.one_hot(micro_batch.sources, len(self.names)).double()
        return weighted.sum(), by_source

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return ``loss``, and with several data sets ``loss/<name>`` for each that has targets in this step."""
        by_source = sums[: len(self.names)]  # an objective made of this one may have appended its own
        metrics = {"loss": sum(by_source) / self.divisor(batch)}
        if len(self.names) > 1:
            columns = zip(self.names, by_source, batch.target_weights, strict=True)
            metrics |= {f"loss/{name}": value / weight for name, value, weight in columns if weight}
        return metrics
