"""Knowledge distillation: a student minimises the divergence from a teacher's token distribution (logit distillation).

P is the teacher's distribution of the next token, Q the student's, both from logits divided by ``distil_temperature``
T. Each target's loss is

    w * cross-entropy + (1 - w) * T^2 * D(P, Q)

with w = ``cross_entropy_weight``. T^2 keeps the size of the gradients: Hinton et al. 2015,
https://arxiv.org/abs/1503.02531, section 2. ``divergence`` says which D:

- forward_kl: KL(P || Q), mode-covering.
- reverse_kl: KL(Q || P), mode-seeking. Gu et al. 2024, https://arxiv.org/abs/2306.08543.
- jsd, generalised Jensen-Shannon divergence: b KL(P || M) + (1 - b) KL(Q || M), where M = b P + (1 - b) Q and b =
  ``beta``. Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, equation 1.

The sum over the targets is divided by the sum of their weights, as in supervised training.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import BatchSource, GlobalBatch
from kit.rollouts.rollouts import Rollouts
from kit.run.run import Run
from kit.strategy.accelerator import Prepared
from kit.strategy.float64 import in_float64
from kit.system import phases
from kit.tasks.distil.stored_teacher import StoredTeacher, store_teacher
from kit.tasks.distil.teacher import Teacher, open_teacher
from kit.tasks.sft.loss import SupervisedLoss
from kit.train.policy import Policy
from kit.train.step_loss import Terms

METRICS = ("cross_entropy", "divergence", "entropy", "teacher_entropy", "teacher_agreement")


@dataclass
class Distillation(SupervisedLoss):
    """See the module."""

    teacher: Teacher | StoredTeacher | None = None

    @classmethod
    def open(cls, run: Run) -> Self:
        """With ``teacher_top_k`` the teacher runs here, alone on the device. See ``Objective.open``."""
        made = super().open(run)
        if run.checked.recipe.teacher_top_k:
            run.enter(phases.TEACHER)
            made.teacher = store_teacher(run)
        return made

    def bind(self, policy: Policy, run: Run) -> None:
        """Load the teacher next to the student, unless its log-probabilities are cached. See ``Objective.bind``."""
        self.teacher = self.teacher or open_teacher(run, run.checked.recipe)
        policy.notes.append(self.teacher.description)

    def open_feed(self, policy: Policy, run: Run) -> BatchSource:
        """With ``on_policy_share`` open rollouts. See ``Objective.open_feed``."""
        return Rollouts(policy, run) if run.checked.recipe.on_policy_share else super().open_feed(policy, run)

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with the teacher's hidden states."""
        assert self.teacher is not None
        return self.teacher.states(batch)

    def target_values(self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the loss and the numbers of ``METRICS`` of each target; see ``Objective.target_values``."""
        assert self.teacher is not None
        settings = self.settings
        p, q, agrees = self.teacher.compare(micro_batch, logits, rows, settings.distil_temperature)
        distance = divergence(p, q, settings.divergence, settings.reward_scale)
        cross_entropy = F.cross_entropy(logits, micro_batch.targets[rows], reduction="none")
        weight = settings.cross_entropy_weight
        loss = weight * cross_entropy + (1 - weight) * settings.distil_temperature**2 * distance
        with torch.no_grad():
            entropies = [_expected(each, -each) for each in (q, p)]
        return torch.stack([loss, cross_entropy.detach(), distance.detach(), *entropies, agrees.float()], dim=1)

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``; the last numbers are the sums of ``METRICS``."""
        terms, by_dataset = super().terms(losses[:, 0], micro_batch)
        sums = in_float64(micro_batch.weights) @ in_float64(losses[:, 1:].detach())
        return terms, torch.cat([by_dataset, sums])

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return the metrics of supervised training, and means over the targets.

        ``divergence`` is D, without T^2; ``teacher_agreement`` the top-1 agreement: the fraction of targets for which
        both models have the same most probable token.
        """
        (divisor,) = self.divisors(batch)
        own = zip(METRICS, sums[-len(METRICS) :], strict=True)
        return super().metrics(sums, batch) | {name: value / divisor for name, value in own}


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str, weight: float = 0.5) -> torch.Tensor:
    """Return D(P, Q) of each row, float32 [C], from log-probabilities [C, V]; a token without probability counts 0.

    Args:
        kind: ``divergence``.
        weight: b, of jsd.
    """
    if kind == "forward_kl":
        return _expected(p, p - q)
    if kind == "reverse_kl":
        return _expected(q, q - p)
    mixed = torch.logaddexp(p + math.log(weight), q + math.log1p(-weight))
    return weight * _expected(p, p - mixed) + (1 - weight) * _expected(q, q - mixed)


def _expected(logps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean of values [C, V] under the distribution with these log-probabilities, [C]."""
    probabilities = logps.exp()
    return torch.where(probabilities > 0, probabilities * values, 0.0).sum(dim=-1)
