"""SFT losses: cross-entropy, label smoothing, z-loss, DFT and EAFT."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.strategy.float64 import in_float64
from kit.tasks.base import Objective
from kit.train.step_loss import Terms


class SupervisedLoss(Objective):
    """Weighted cross-entropy in nats per supervised token; the weights are usually 1."""

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return the sum of the weights of all targets."""
        return [batch.target_weights.sum()]

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Return the sum of the weighted losses, and the same sum for each dataset."""
        weighted = losses * micro_batch.weights  # [S]
        datasets = F.one_hot(micro_batch.dataset_ids, len(self.dataset_names))
        by_dataset = in_float64(weighted.detach()) @ in_float64(datasets)
        return [weighted.sum()], by_dataset

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, and with several datasets ``loss/<name>`` for each that has targets in this step."""
        by_dataset = sums[: len(self.dataset_names)]  # an objective made of this one may have appended its own
        (divisor,) = self.divisors(batch)
        metrics = {"loss": sum(by_dataset) / divisor}
        if len(self.dataset_names) > 1:
            columns = zip(self.dataset_names, by_dataset, batch.target_weights, strict=True)
            metrics |= {f"loss/{name}": value / weight for name, value, weight in columns if weight}
        return metrics

    def evaluation_metrics(self, sums: list[float], whole: GlobalBatch) -> dict[str, float]:
        """See ``Objective.evaluation_metrics``; ``perplexity``, and with several datasets the tokens of each."""
        metrics = super().evaluation_metrics(sums, whole)
        # exp overflows a float beyond this value; for so high a loss the exact perplexity does not matter.
        metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        for name, num_tokens in zip(self.dataset_names, whole.num_targets.tolist(), strict=True):
            metrics |= {f"tokens/{name}": num_tokens} if f"loss/{name}" in metrics else {}
        return metrics


class SmoothedLoss(SupervisedLoss):
    """Label smoothing: cross-entropy against targets with the probability 1 - e, with e = ``label_smoothing_factor``.

    e is spread evenly over the vocabulary, the target too: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567,
    section 7.
    """

    def target_values(self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """See ``Objective.target_values``."""
        factor = self.settings.label_smoothing_factor
        return F.cross_entropy(logits, micro_batch.targets[rows], reduction="none", label_smoothing=factor)


class ZLoss(SmoothedLoss):
    """z-loss: adds ``z_loss_coef`` times (log Z)^2 to each target's loss; Z is the sum of the exponentiated logits.

    It keeps the logits from drifting: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5.
    """

    def target_values(self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the cross-entropy and the auxiliary term, float32 [C, 2]; see ``Objective.target_values``."""
        added = self.settings.z_loss_coef * logits.logsumexp(dim=-1) ** 2
        return torch.stack([super().target_values(micro_batch, logits, rows), added], dim=1)

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``; the last number is the sum of the auxiliary term."""
        terms, by_dataset = super().terms(losses.sum(dim=1), micro_batch)
        added = in_float64(losses[:, 1].detach()) @ in_float64(micro_batch.weights)
        return terms, torch.cat([by_dataset, added[None]])

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return the metrics, ``loss`` with the auxiliary term, and ``z_loss``, that term alone."""
        (divisor,) = self.divisors(batch)
        return super().metrics(sums, batch) | {"z_loss": sums[-1] / divisor}


class DynamicFineTuning(SupervisedLoss):
    """DFT: cross-entropy times the probability p of the token, through which no gradient passes.

    -sg(p) log p: Wu et al. 2025, https://arxiv.org/abs/2508.05629, equation 9.
    """

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``."""
        return super().terms(losses * (-losses.detach()).exp(), micro_batch)


class EntropyAdaptive(SupervisedLoss):
    """EAFT: cross-entropy times (H / ln K) ** ``eaft_alpha``, through which no gradient passes.

    H is the entropy of the K = 20 most probable tokens, whose probabilities are renormalised. So a token that
    contradicts a confident model has a small weight: Diao et al. 2026, https://arxiv.org/abs/2601.02151, section 4.
    """

    num_entropy_tokens: ClassVar[int] = 20

    def target_values(self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """See ``Objective.target_values``."""
        largest = logits.detach().topk(min(self.num_entropy_tokens, logits.shape[-1]), dim=-1).values  # [C, K]
        entropy = torch.special.entr(largest.softmax(dim=-1)).sum(dim=-1)
        weights = (entropy / math.log(largest.shape[-1])) ** self.settings.eaft_alpha
        return F.cross_entropy(logits, micro_batch.targets[rows], reduction="none") * weights
