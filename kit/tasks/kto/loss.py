"""Kahneman-Tversky optimisation (KTO). The notation is that of ``kit.tasks.preference.loss``."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from kit.data.feed.batches import MicroBatch, on_device
from kit.data.feed.feed import GlobalBatch
from kit.data.feed.mismatched import Mismatched
from kit.strategy.accelerator import Prepared
from kit.strategy.float64 import in_float64
from kit.tasks.base import Batches, MeanLoss
from kit.train.policy import Policy
from kit.train.reference import sequence_logps, sequence_weights, with_references, without_gradients
from kit.train.step_loss import Terms


class KahnemanTversky(MeanLoss):
    """KTO on single answers: with r = log pi(y|x)/ref(y|x), the mean of

    - ``desirable_weight`` * (1 - s(beta (r - z))) of desirable answers,
    - ``undesirable_weight`` * (1 - s(beta (z - r))) of undesirable ones.

    z is max(0, mean of log pi(y'|x)/ref(y'|x)) over the global batch, where y' is the answer to another prompt
    (``kit.data.feed.mismatched``); no gradient passes through it. Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306, equations 7 and 8.
    """

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with the reference model's log-probabilities and z, if it lacks z."""
        micro_batches = with_references(prepared, batch.micro_batches)
        if any("kl" not in micro_batch.per_sequence for micro_batch in micro_batches):
            kl = self.estimate_kl(prepared, batch.mismatched, batch.num_samples)
            micro_batches = [each.with_per_sequence(kl=kl.expand(len(each.segments))) for each in micro_batches]
        return replace(batch, micro_batches=micro_batches)

    def evaluation_values(
        self, policy: Policy, mismatched: Mismatched | None, num_samples: int, batches: Batches
    ) -> dict[str, torch.Tensor]:
        """See ``Objective.evaluation_values``: z."""
        assert mismatched is not None
        return {"kl": self.estimate_kl(policy, batches(mismatched, "evaluation kl"), num_samples)}

    def estimate_kl(self, prepared: Prepared, mismatched: Iterable[MicroBatch], num_samples: int) -> torch.Tensor:
        """Return z, float64 [], from the micro-batches of this rank. Called by all ranks."""
        sums = []
        for micro_batch in on_device(mismatched, prepared.accelerator.device):
            (known,) = with_references(prepared, [micro_batch])
            with without_gradients(prepared):
                logps = sequence_logps(prepared.model(**known.model_inputs()), known)
            sums.append((logps - in_float64(known.per_sequence["references"]).to(logps)).sum())
        return (prepared.ranks.sum(torch.stack(sums).sum()) / num_samples).clamp(min=0)

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Return the sum of the losses of the answers; then the sums of the metrics."""
        beta, settings = self.settings.reward_scale, self.settings
        logps = sequence_logps(losses, micro_batch)  # [n]
        references, kl, good = (
            in_float64(micro_batch.per_sequence[name]).to(logps) for name in ("references", "kl", "labels")
        )
        ratios = logps - references
        signs = 2 * good - 1
        weights = torch.where(good > 0, settings.desirable_weight, settings.undesirable_weight)
        term = (weights * torch.sigmoid(-beta * signs * (ratios - kl))).sum()  # 1 - s(z) is s(-z)
        with torch.no_grad():
            of_answers = torch.stack([torch.ones_like(logps), beta * ratios, logps, sequence_weights(micro_batch)])
            numbers = [term[None], kl.sum()[None], (of_answers @ good), of_answers @ (1 - good)]
            return [term], torch.cat([each.detach() for each in numbers])

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss`` and ``kl``, z; and the metrics of pairs, for desirable (chosen) and undesirable answers.

        A label without answers in this batch is left out.
        """
        term, kl, *of_answers = sums
        metrics = {"loss": term / batch.num_samples, "kl": kl / batch.num_samples}
        for name, (num, *others) in (("chosen", of_answers[:4]), ("rejected", of_answers[4:])):
            if num:
                keys = (f"rewards/{name}", f"logps/{name}", f"lengths/{name}")
                metrics |= {key: value / num for key, value in zip(keys, others, strict=True)}
        if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics
