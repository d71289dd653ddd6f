"""The loss of a step, as objectives define it.

It must be a sum over the targets of the global batch, divided by a number that every rank knows before the step; or
several such terms, added. Then it does not depend on how the batch is divided into micro-batches and ranks. A mean of
means would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.strategy.accelerator import Prepared

# What ``StepLoss.terms`` returns.
Terms = tuple[Sequence[torch.Tensor], torch.Tensor]


@dataclass
class StepLoss:
    """What a step minimises: one or more terms, each a sum over the global batch divided by its own divisor.

    ``train_step`` calls, in this order: ``begin_step`` once, ``divisors`` once, ``terms`` for each micro-batch, and
    ``metrics`` once. Nothing is kept between two steps, so that a run can continue from any of them. What is defined
    here is of a loss over the cross-entropy of each target, without a pass before the step.

    Attributes:
        dataset_names: the names of the training datasets, by their index in ``MicroBatch.dataset_ids``.
        target_values: None: ``terms`` gets the cross-entropy of each target, which is all that most objectives need.

            Else a method ``target_values(self, micro_batch, logits, rows)``: ``terms`` gets its values instead, float32
            [C] or [C, K]. It computes them from the logits, float32 [C, V], of some targets of ``micro_batch``: those
            of the slice ``rows``. The loss head calls it for one chunk after another, because the logits of all targets
            would not fit. So the values of a target depend on no logits but its own, and C may be 0. Evaluations do not
            call it.

            Cost: memory for each tensor [C, V] that it makes; and under a frozen head the logits are computed twice.
    """

    dataset_names: Sequence[str]
    settings: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    target_values: ClassVar[Callable[..., torch.Tensor] | None] = None

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch to train on, with what the terms need in addition. Called by all ranks.

        Here an objective makes a pass without gradients, such as that of a reference model, and returns the batch with
        micro-batches that hold its result. All ranks must call the model the same number of times.
        """
        return batch

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return for each term the number that divides its sum over the global batch; the same on every rank."""
        raise NotImplementedError

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Compute the part of one micro-batch.

        Args:
            losses: float32 [S], the cross-entropy of each target of ``micro_batch``, in nats: ``-losses`` are the
                log-probabilities of the targets. With ``target_values`` its values instead, float32 [S] or [S, K]. The
                auxiliary loss of routers is not in them: ``train_step`` adds it to what is minimised. Of a
                classification or embedding head what it computes of each target, float32 [S, ...].

        Returns:
            For each term its part of the sum, shape [], to be differentiated; and numbers for the metrics, float64 [n],
            detached (``in_float64``), which are summed over the micro-batches of all ranks.
        """
        raise NotImplementedError

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Compute the metrics of the step.

        Args:
            sums: the n numbers of ``terms``, summed over the global batch.

        Returns:
            The metrics by name; ``loss`` is the number that was minimised, without the auxiliary loss of routers.
        """
        raise NotImplementedError
