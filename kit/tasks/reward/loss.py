"""The objective of a reward model: Bradley-Terry on preference pairs."""

import torch
import torch.nn.functional as F

from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.strategy.float64 import in_float64
from kit.tasks.base import MeanLoss
from kit.train.step_loss import Terms


class RewardModelling(MeanLoss):
    """-log s(r_w - r_l - m) + c (r_w + r_l)^2 of each pair, with its margin m and c = ``center_rewards_coefficient``.

    r are the rewards of the chosen and the rejected text, and s is the logistic function. Bradley and Terry 1952, as in
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1; m: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288, equation 2; c: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``; the numbers are the loss, and sums over pairs."""
        rewards = in_float64(losses).reshape(-1, 2)  # [P, 2]
        differences = rewards[:, 0] - rewards[:, 1]
        margins = in_float64(micro_batch.per_sequence["values"]).to(rewards)[::2, 0]
        term = -F.logsigmoid(differences - margins).sum()
        term = term + self.settings.center_rewards_coefficient * (rewards.sum(dim=1) ** 2).sum()
        with torch.no_grad():
            own = [term, (differences > 0).sum(), differences.sum(), rewards[:, 0].sum(), rewards[:, 1].sum()]
            return [term], torch.stack([each.to(differences) for each in own])

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, the fraction of pairs whose chosen text has the larger reward, and means over pairs."""
        names = ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected")
        return {name: value / batch.num_samples for name, value in zip(names, sums, strict=True)}
