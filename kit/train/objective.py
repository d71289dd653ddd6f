"""What a step minimises: from the loss of each token to one number and its metrics.

An objective is handed to ``train_step``; any object with these three methods is one. What it minimises over a global
batch must be a sum over the batch's targets, divided by a number that every rank knows before the step. Then it is the
same however the batch is cut into micro-batches and dealt to ranks: no mean of means can arise.
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
    """The sum that is minimised, by its parts."""

    def divisor(self, batch: "GlobalBatch") -> float:
        """What the sum over the global batch is divided by; the same on every rank."""

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[torch.Tensor, torch.Tensor]:
        """One micro-batch's part of the sum, and of what the metrics are made from.

        Args:
            losses: float32 [S], the model's cross-entropy in nats of each target of ``micro_batch``.

        Returns:
            The part of the sum, shape [], to be differentiated; and float64 [n], detached, to be added up over the
            micro-batches of all ranks.
        """

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """The metrics of the step from the n sums over the global batch; ``loss`` is what was minimised."""


@dataclass(frozen=True)
class SupervisedLoss:
    """Cross-entropy in nats per supervised token, each weighted; weights are 1 as a rule."""

    names: Sequence[str]  # of the data sets

    def divisor(self, batch: "GlobalBatch") -> float:
        return batch.target_weights.sum()

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[torch.Tensor, torch.Tensor]:
        weighted = losses * micro_batch.weights  # [S]
        by_source = weighted.detach().double() @ F.one_hot(micro_batch.sources, len(self.names)).double()
        return weighted.sum(), by_source

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """``loss``, and with several data sets ``loss/<name>`` for each that had a target in this step."""
        metrics = {"loss": sum(sums) / self.divisor(batch)}
        if len(self.names) > 1:
            columns = zip(self.names, sums, batch.target_weights, strict=True)
            metrics |= {f"loss/{name}": value / weight for name, value, weight in columns if weight}
        return metrics
