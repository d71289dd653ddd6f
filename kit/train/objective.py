"""Objectives: how the losses of single tokens become the number that a step minimises, and its metrics.

The setting ``objective`` names one of ``OBJECTIVES``. What is minimised must be a sum over the targets of the global
batch, divided by a number that every rank knows before the step; or several such terms, added. Then it does not depend
on how the batch is divided into micro-batches and ranks. A mean of means would.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F

from kit.config.settings.objective import ObjectiveSettings
from kit.strategy.float64 import in_float64
from kit.train.objective_base import ObjectiveBase
from kit.train.policy_loss import PolicyLoss
from kit.train.preference import (
    ContrastivePreference,
    DirectPreference,
    KahnemanTversky,
    OddsRatio,
    SimplePreference,
)

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.data.feed.feed import GlobalBatch
    from kit.strategy.accelerator import Prepared


class Objective(Protocol):
    """What a step minimises: one or more terms, each a sum over the global batch divided by its own divisor.

    ``train_step`` calls, in this order: ``begin_step`` once, ``divisors`` once, ``terms`` for each micro-batch, and
    ``metrics`` once. An objective keeps nothing between two steps, so that a run can continue from any of them. What
    must be known before model and data are opened is declared as an attribute of the class, which ``OBJECTIVES`` gives.
    """

    def __init__(self, dataset_names: Sequence[str], settings: ObjectiveSettings) -> None:
        """
        Args:
            dataset_names: the names of the training data sets, by their index in ``MicroBatch.dataset_ids``.
        """

    def begin_step(self, prepared: "Prepared", batch: "GlobalBatch") -> "GlobalBatch":
        """Return the batch to train on, with what the terms need beside it. Called by all ranks.

        Here an objective makes a pass without gradients, such as that of a reference model, and returns the batch with
        micro-batches that hold its result. All ranks must call the model the same number of times.
        """

    def estimate_kl(
        self, prepared: "Prepared", mismatched: Iterable["MicroBatch"], num_samples: int
    ) -> torch.Tensor | None:
        """Return ``kl``, float64 [], for an evaluation over answers with a label; None for any other objective."""

    @property
    def target_values(self) -> Callable[..., torch.Tensor] | None:
        """None: ``terms`` gets the cross-entropy of each target, which is all that most objectives need.

        Else a method ``target_values(self, micro_batch, logits, rows)``: ``terms`` gets its values instead, float32 [C]
        or [C, K]. It computes them from the logits, float32 [C, V], of some targets of ``micro_batch``: those of the
        slice ``rows``. The loss head calls it for one chunk after another, because the logits of all targets would not
        fit. So the values of a target depend on no logits but its own, and C may be 0. Evaluations do not call it.

        Price: memory for each tensor [C, V] that it makes; and under a frozen head the logits are computed twice.
        """

    def divisors(self, batch: "GlobalBatch") -> Sequence[float]:
        """Return for each term the number that divides its sum over the global batch; the same on every rank."""

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Compute the part of one micro-batch.

        Args:
            losses: float32 [S], the cross-entropy of each target of ``micro_batch``, in nats: ``-losses`` are the
                log-probabilities of the targets. With ``target_values`` its values instead, float32 [S] or [S, K]. The
                auxiliary loss of routers is not in them: ``train_step`` adds it to what is minimised.

        Returns:
            For each term its part of the sum, shape [], to be differentiated; and numbers for the metrics, float64 [n],
            detached (``in_float64``), which are summed over the micro-batches of all ranks.
        """

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Compute the metrics of the step.

        Args:
            sums: the n numbers of ``terms``, summed over the global batch.

        Returns:
            The metrics by name; ``loss`` is the number that was minimised, without the auxiliary loss of routers.
        """


class SupervisedLoss(ObjectiveBase):
    """Weighted cross-entropy in nats per supervised token; the weights are usually 1."""

    def divisors(self, batch: "GlobalBatch") -> Sequence[float]:
        """Return the sum of the weights of all targets."""
        return [batch.target_weights.sum()]

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the sum of the weighted losses, and the same sum for each data set."""
        weighted = losses * micro_batch.weights  # [S]
        datasets = F.one_hot(micro_batch.dataset_ids, len(self.dataset_names))
        by_dataset = in_float64(weighted.detach()) @ in_float64(datasets)
        return [weighted.sum()], by_dataset

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return ``loss``, and with several data sets ``loss/<name>`` for each that has targets in this step."""
        by_dataset = sums[: len(self.dataset_names)]  # an objective made of this one may have appended its own
        (divisor,) = self.divisors(batch)
        metrics = {"loss": sum(by_dataset) / divisor}
        if len(self.dataset_names) > 1:
            columns = zip(self.dataset_names, by_dataset, batch.target_weights, strict=True)
            metrics |= {f"loss/{name}": value / weight for name, value, weight in columns if weight}
        return metrics


class SmoothedLoss(SupervisedLoss):
    """Cross-entropy against targets with the probability 1 - e, with e = ``label_smoothing_factor``.

    e is spread evenly over the vocabulary, the target too: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567,
    section 7.
    """

    def target_values(self, micro_batch: "MicroBatch", logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """See ``Objective.target_values``."""
        factor = self.settings.label_smoothing_factor
        return F.cross_entropy(logits, micro_batch.targets[rows], reduction="none", label_smoothing=factor)


class ZLoss(SmoothedLoss):
    """Adds ``z_loss_coef`` times (log Z)^2 to the loss of each target; Z is the sum of the exponentiated logits.

    It keeps the logits from drifting: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5.
    """

    def target_values(self, micro_batch: "MicroBatch", logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the cross-entropy and the term beside it, float32 [C, 2]; see ``Objective.target_values``."""
        added = self.settings.z_loss_coef * logits.logsumexp(dim=-1) ** 2
        return torch.stack([super().target_values(micro_batch, logits, rows), added], dim=1)

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """See ``Objective.terms``; the last number is the sum of what is added."""
        terms, by_dataset = super().terms(losses.sum(dim=1), micro_batch)
        added = in_float64(losses[:, 1].detach()) @ in_float64(micro_batch.weights)
        return terms, torch.cat([by_dataset, added[None]])

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return the metrics, ``loss`` with what is added, and ``z_loss``, that part alone."""
        (divisor,) = self.divisors(batch)
        return super().metrics(sums, batch) | {"z_loss": sums[-1] / divisor}


class DynamicFineTuning(SupervisedLoss):
    """Cross-entropy times the probability p that the model gives to the token, through which no gradient passes.

    -sg(p) log p: Wu et al. 2025, https://arxiv.org/abs/2508.05629, equation 9.
    """

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """See ``Objective.terms``."""
        return super().terms(losses * (-losses.detach()).exp(), micro_batch)


class EntropyAdaptive(SupervisedLoss):
    """Cross-entropy times (H / ln K) ** ``eaft_alpha``, through which no gradient passes.

    H is the entropy of the K = 20 most probable tokens, whose probabilities are divided by their sum. So a token that
    contradicts what the model is sure of teaches little: Diao et al. 2026, https://arxiv.org/abs/2601.02151, section 4.
    """

    num_entropy_tokens: ClassVar[int] = 20

    def target_values(self, micro_batch: "MicroBatch", logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """See ``Objective.target_values``."""
        largest = logits.detach().topk(min(self.num_entropy_tokens, logits.shape[-1]), dim=-1).values  # [C, K]
        entropy = torch.special.entr(largest.softmax(dim=-1)).sum(dim=-1)
        weights = (entropy / math.log(largest.shape[-1])) ** self.settings.eaft_alpha
        return F.cross_entropy(logits, micro_batch.targets[rows], reduction="none") * weights


# By the name that the setting ``objective`` gives. DECLARED in kit/config/settings/objective.py has the same names.
OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SupervisedLoss,
    "dft": DynamicFineTuning,
    "eaft": EntropyAdaptive,
    "dpo": DirectPreference,
    "orpo": OddsRatio,
    "simpo": SimplePreference,
    "cpo": ContrastivePreference,
    "kto": KahnemanTversky,
    "grpo": PolicyLoss,
}


def build_objective(settings: ObjectiveSettings, dataset_names: Sequence[str]) -> Objective:
    """Create the objective that the setting ``objective`` names, see ``Objective``."""
    named = OBJECTIVES[settings.objective]
    if named is SupervisedLoss and settings.z_loss_coef:
        named = ZLoss
    elif named is SupervisedLoss and settings.label_smoothing_factor:
        named = SmoothedLoss
    return named(dataset_names, settings)
