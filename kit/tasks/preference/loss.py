"""Preference optimisation on pairs of a chosen and a rejected answer: DPO, ORPO, SimPO, CPO.

In the equations x is a prompt, y_w its chosen and y_l its rejected answer, pi the policy and ref the reference model,
the initial policy. log pi(y|x) is the sum of the log-probabilities of the supervised tokens of y, each
times its weight, and |y| the sum of these weights. s is the logistic function.

Each term is a sum over pairs, or over the tokens of the chosen answers, divided by their number in the
global batch. So the result does not depend on how the global batch is cut up.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.strategy.accelerator import Prepared
from kit.strategy.float64 import in_float64
from kit.tasks.base import Objective
from kit.train.reference import sequence_logps, sequence_weights, with_references
from kit.train.step_loss import Terms

PER_PAIR = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
PER_ANSWER = ("logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected")


class Pairs(NamedTuple):
    """P pairs of a micro-batch, float64 [P, 2]: of the chosen answer, and of the rejected one."""

    logps: torch.Tensor  # log pi(y|x)
    lengths: torch.Tensor  # |y|
    references: torch.Tensor  # log ref(y|x); 0 without a reference model

    @property
    def ratios(self) -> torch.Tensor:
        """log pi(y|x) / ref(y|x)."""
        return self.logps - self.references

    @classmethod
    def of(cls, losses: torch.Tensor, micro_batch: MicroBatch) -> "Pairs":
        """Add up the losses of the targets, float32 [S], by answer."""
        logps = sequence_logps(losses, micro_batch).reshape(-1, 2)
        references = micro_batch.per_sequence.get("references")
        known = torch.zeros_like(logps) if references is None else in_float64(references).to(logps).reshape(-1, 2)
        return cls(logps, sequence_weights(micro_batch).reshape(-1, 2), known)


class PairLoss(Objective):
    """A mean over pairs, for some objectives plus a mean over the tokens of the chosen answers.

    A subclass may define another loss of a pair, or implicit reward of an answer.
    """

    @property
    def beta(self) -> float:
        """The scale of the rewards."""
        return self.settings.reward_scale

    @property
    def likelihood_weight(self) -> float:
        """The weight of the chosen answers' cross-entropy, in nats per token; 0: none."""
        return 0.0

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """Return the loss of each pair, float64 [P]: -log s(chosen reward - rejected reward)."""
        rewards = self.rewards(pairs)
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1])

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        """Return the implicit reward of each answer, float64 [P, 2]."""
        return self.beta * pairs.ratios

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with the reference model's log-probabilities, if the objective has one."""
        if not self.settings.declared.has_reference:
            return batch
        return replace(batch, micro_batches=with_references(prepared, batch.micro_batches))

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return the number of pairs, and the sum of the weights of the chosen answers' tokens if they are a term."""
        return [batch.num_samples, *([batch.chosen_weight] if self.likelihood_weight else [])]

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Return the sum of the losses of the pairs, and of the cross-entropy; then the sums of the metrics."""
        pairs = Pairs.of(losses, micro_batch)
        terms = [self.losses(pairs).sum()]
        if self.likelihood_weight:
            terms.append(-self.likelihood_weight * pairs.logps[:, 0].sum())
        with torch.no_grad():
            rewards = self.rewards(pairs)
            margins = rewards[:, 0] - rewards[:, 1]
            of_pairs = torch.stack([*rewards.sum(dim=0), margins.sum(), (margins > 0).sum()])
            numbers = [torch.stack(terms), of_pairs, pairs.logps.sum(dim=0), pairs.lengths.sum(dim=0)]
            return terms, torch.cat([each.detach() for each in numbers])

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, and the means over pairs of rewards, log-probabilities and lengths in tokens.

        ``rewards/accuracies`` is the fraction of pairs whose chosen answer has the larger reward. ``nll_loss``, if it
        is a term, is the cross-entropy of the chosen answers in nats per token.
        """
        divisors = self.divisors(batch)
        num_terms = len(divisors)
        of_terms = [value / divisor for value, divisor in zip(sums[:num_terms], divisors, strict=True)]
        means = [value / batch.num_samples for value in sums[num_terms:]]
        metrics = {"loss": sum(of_terms), **dict(zip((*PER_PAIR, *PER_ANSWER), means, strict=True))}
        if self.likelihood_weight:
            metrics["nll_loss"] = of_terms[1] / self.likelihood_weight
        return metrics


class DirectPreference(PairLoss):
    """Direct preference optimisation (DPO), with the log-ratios w = log pi(y_w|x)/ref(y_w|x), l = log
    pi(y_l|x)/ref(y_l|x), and h = w - l.

    ``rpo_alpha`` times the cross-entropy of the chosen answers is added (RPO): Pang et al. 2024,
    https://arxiv.org/abs/2404.19733, equation 1; as in TRL a mean over tokens, there over answers.

    ``dpo_loss``, with e = ``label_smoothing``:

    - sigmoid: -(1 - e) log s(beta h) - e log s(-beta h). Rafailov et al. 2023, https://arxiv.org/abs/2305.18290,
      equation 7; e above 0: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, equation 3.
    - robust: (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e). Chowdhury et al. 2024,
      https://arxiv.org/abs/2403.00409.
    - hinge: max(0, 1 - beta h). Liu et al. 2023, https://arxiv.org/abs/2309.06657, there hinge-norm.
    - ipo: (h' - 1 / (2 beta))^2, where each ratio of h' is divided by |y|. Azar et al. 2023,
      https://arxiv.org/abs/2310.12036, equation 17; by length as its authors computed it.
    - sigmoid_norm: sigmoid of h' instead of h. Lambert et al. 2024, https://arxiv.org/abs/2411.15124, equation 6.
    - apo_zero: 1 - s(beta w) + s(beta l); apo_down: s(beta w) + 1 - s(beta h). D'Oosterlinck et al. 2024,
      https://arxiv.org/abs/2408.06266, equations 7 and 8.
    - bco_pair: -log s(beta w) - log s(-beta l), as TRL has it: Jung et al. 2024, https://arxiv.org/abs/2404.04656, with
      the reward shift 0.
    """

    @property
    def likelihood_weight(self) -> float:
        """See ``PairLoss.likelihood_weight``."""
        return self.settings.rpo_alpha

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See ``PairLoss.losses``."""
        kind, smoothing = self.settings.dpo_loss, self.settings.label_smoothing
        chosen, rejected = self.rewards(pairs).unbind(dim=1)
        if kind == "apo_zero":
            return torch.sigmoid(-chosen) + torch.sigmoid(rejected)  # 1 - s(z) is s(-z)
        if kind == "apo_down":
            return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
        if kind == "bco_pair":
            return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)
        ratios = pairs.ratios / pairs.lengths if kind in ("ipo", "sigmoid_norm") else pairs.ratios
        difference = ratios[:, 0] - ratios[:, 1]
        if kind == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        if kind == "hinge":
            return torch.relu(1 - self.beta * difference)
        right, wrong = -F.logsigmoid(self.beta * difference), -F.logsigmoid(-self.beta * difference)
        if kind == "robust":
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        return (1 - smoothing) * right + smoothing * wrong


class OddsRatio(PairLoss):
    """ORPO: cross-entropy of the chosen answers, and -beta log s(log odds(y_w|x) - log odds(y_l|x)).

    odds(y|x) = p / (1 - p) with log p = log pi(y|x) / |y|. Hong et al. 2024, https://arxiv.org/abs/2403.07691,
    equations 6 and 7. The cross-entropy is that of the answers; some implementations train on the prompts too.
    """

    @property
    def likelihood_weight(self) -> float:
        """See ``PairLoss.likelihood_weight``."""
        return 1.0

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        """See ``PairLoss.rewards``."""
        return self.beta * pairs.logps / pairs.lengths

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See ``PairLoss.losses``."""
        log_p = pairs.logps / pairs.lengths
        log_odds = log_p - _log_1_minus_exp(log_p)
        return -self.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


class SimplePreference(PairLoss):
    """SimPO: -log s(beta log pi(y_w|x) / |y_w| - beta log pi(y_l|x) / |y_l| - gamma), without a reference model.

    Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6.
    """

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        """See ``PairLoss.rewards``."""
        return self.beta * pairs.logps / pairs.lengths

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See ``PairLoss.losses``."""
        rewards = self.rewards(pairs)
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.settings.simpo_gamma)


class ContrastivePreference(PairLoss):
    """CPO: -log s(beta log pi(y_w|x) - beta log pi(y_l|x)), and ``cpo_alpha`` times the chosen answers' cross-entropy.

    Xu et al. 2024, https://arxiv.org/abs/2401.08417, equations 3 to 5.
    """

    @property
    def likelihood_weight(self) -> float:
        """See ``PairLoss.likelihood_weight``."""
        return self.settings.cpo_alpha


def _log_1_minus_exp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(value)) for negative values in float64. 0, whose odds are infinite, counts as the largest below."""
    return torch.log(-torch.expm1(value.clamp(max=-1e-12)))
