"""Policy gradients over groups of completions: GRPO and its family.

In the equations o_i is completion i of G for a prompt, with |o_i| tokens and the advantage A_i (``advantages``), and
r_it = pi(o_it) / old(o_it) is the probability ratio, where old is the policy that sampled the completions.

Each term is a sum over the targets of the global batch, divided by a number that is known before the step. So it does
not depend on how the batch is cut up.
"""

from collections.abc import Callable, Sequence

import torch

from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import BatchSource, GlobalBatch
from kit.rollouts.rollouts import Rollouts
from kit.rollouts.trajectories import tempered_losses
from kit.run.run import Run
from kit.strategy.float64 import in_float64
from kit.tasks.base import Objective
from kit.train.policy import Policy
from kit.train.reference import by_sequence, sequence_weights
from kit.train.step_loss import Terms


class PolicyLoss(Objective):
    """The policy-gradient loss of sampled completions, weighted by their advantages.

    ``policy_loss``, with e_low = ``epsilon`` and e_high = ``epsilon_high``, and the surrogate of a ratio
    s(r, A) = min(r A, clip(r, 1 - e_low, 1 + e_high) A):

    Means are over the whole global batch, not first over the completions of one prompt.

    - grpo: the mean over completions of 1/|o_i| sum_t -s(r_it, A_i). https://arxiv.org/abs/2402.03300, equation 3.
    - dapo: the mean over tokens of -s(r_it, A_i). Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 8.
    - dr_grpo: the mean over completions of sum_t -s(r_it, A_i) / ``max_new_tokens``. https://arxiv.org/abs/2503.20783.
    - gspo: the mean over completions of -s(r_i, A_i), log r_i = 1/|o_i| sum_t log r_it. Zheng et al. 2025,
      https://arxiv.org/abs/2507.18071, equations 5 and 7.
    - cispo: the mean over tokens of -sg(min(r_it, 1 + e_high)) A_i log pi(o_it). MiniMax 2025,
      https://arxiv.org/abs/2506.13585, equation 4.
    - rloo: the mean over completions of -s(r_i, A_i), log r_i = sum_t log r_it. https://arxiv.org/abs/2402.14740.
    - sapo: the mean over completions of 1/|o_i| sum_t -f(r_it) A_i, f(r) = sigmoid(T (r - 1)) 4 / T, where T is
      ``sapo_temperature_pos`` if A_i > 0, else ``sapo_temperature_neg``. Gao et al. 2025,
      https://arxiv.org/abs/2511.20347.

    With ``importance_sampling_level`` sequence, grpo, dapo and dr_grpo have gspo's ratio r_i for each token: grpo is
    gspo then, and dr_grpo is gspo weighted by |o_i| / ``max_new_tokens``.

    KL penalty: beta times an estimate of KL(pi || reference) is added to each token's loss: of d = log reference -
    log pi, k2 is d^2 / 2, k3 is exp(d) - d - 1. http://joschu.net/blog/kl-approx.html. k1, -d, would in a
    loss pull towards nothing: https://arxiv.org/abs/2510.01555. In rloo beta times k1 of old, summed over a completion,
    is subtracted from its reward instead: https://arxiv.org/abs/2402.14740.

    A vLLM server rounds differently, so that its samples come from another policy than old. Truncated importance
    sampling corrects this mismatch: with ``vllm_importance_sampling_cap`` C each token's loss, without the KL, is
    multiplied by sg(min(old(o_it) / engine(o_it), C)); if its ratio is r_i, by that of the product over a completion.
    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.

    With ``rollout_overlap`` the engine has the weights of a rollout before. Without a cap it is old then.
    """

    @property
    def target_values(self) -> Callable[..., torch.Tensor] | None:  # type: ignore[override]
        """See ``StepLoss.target_values``: with ``rollout_temperature`` the losses of logits divided by it."""
        return tempered_losses(self.settings.rollout_temperature)

    def bind(self, policy: Policy, run: Run) -> None:
        """Keep the weights of the reference model, unless it is the base of an adapter. See ``Objective.bind``."""
        if run.checked.recipe.keeps_initial_weights:
            policy.keep_initial_weights()

    def open_feed(self, policy: Policy, run: Run) -> BatchSource:
        """Open rollouts. See ``Objective.open_feed``."""
        return Rollouts(policy, run)

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return the number of completions, of tokens, or of tokens that there could be."""
        if self.settings.policy_loss in ("dapo", "cispo"):
            return [max(1.0, batch.target_weights.sum())]
        return [max(1, batch.most_targets if self.settings.policy_loss == "dr_grpo" else batch.num_samples)]

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Return the sum of the losses of the tokens or completions; then the sums of the metrics, over tokens."""
        kind, low, high = self.settings.policy_loss, 1 - self.settings.epsilon, 1 + self.settings.upper_epsilon
        assert micro_batch.sequence_ids is not None
        logps = -in_float64(losses)  # [S]
        old = micro_batch.per_target.get("old_logps")
        old_logps = logps.detach() if old is None else in_float64(old).to(logps)
        log_ratios = logps - old_logps
        weights = self._importance_weights(old_logps, micro_batch)
        of_completions = in_float64(micro_batch.per_sequence["advantages"]).to(logps)  # [n]
        completion_of = micro_batch.sequence_ids.to(logps.device)  # [S]
        advantages = of_completions[completion_of]  # [S]
        lengths = sequence_weights(micro_batch).to(logps)  # [n]
        scales = 1 / lengths[completion_of] if kind in ("grpo", "gspo", "rloo", "sapo") else None

        def total(values: torch.Tensor) -> torch.Tensor:
            return (values if scales is None else values * scales).sum()

        if self.settings.by_sequence:
            of_sequences = by_sequence(log_ratios, micro_batch)
            ratios = (of_sequences if kind == "rloo" else of_sequences / lengths.clamp(min=1)).exp()
            # A masked completion has no loss.
            of_each = (lengths > 0) if scales is not None else lengths
            term = (_surrogate(ratios, of_completions, low, high) * weights * of_each).sum()
            ratios, weights = ratios[completion_of], weights.expand_as(ratios)[completion_of]
        else:
            ratios = log_ratios.exp()
            if kind == "sapo":
                low, high = 0.0, torch.inf  # nothing is clipped
                gates = torch.full_like(logps, self.settings.sapo_temperature_neg)
                gates = gates.masked_fill(advantages > 0, self.settings.sapo_temperature_pos)
                term = total(-torch.sigmoid(gates * (ratios - 1)) * 4 / gates * advantages * weights)
            elif kind == "cispo":
                term = total(-ratios.detach().clamp(max=high) * advantages * logps * weights)
            else:
                term = total(_surrogate(ratios, advantages, low, high) * weights)
        reference = micro_batch.per_target.get("reference_logps")
        kl = torch.zeros_like(logps)
        if reference is not None:
            difference = in_float64(reference).to(logps) - logps
            if kind == "rloo":
                kl = -difference
            else:
                is_k2 = self.settings.kl_estimator == "k2"
                kl = difference**2 / 2 if is_k2 else difference.exp() - difference - 1
                term = term + self.settings.reward_scale * total(kl)
        with torch.no_grad():
            clipped = [(ratios < low) & (advantages < 0), (ratios > high) & (advantages > 0)]
            clipped.append(weights.eq(self.settings.vllm_importance_sampling_cap or torch.inf).expand_as(logps))
            sums = [-logps, kl, log_ratios.abs(), *(each.to(logps) for each in clipped)]
            return [term], torch.stack([term.detach(), *(each.detach().sum() for each in sums)])

    def _importance_weights(self, old_logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """The truncated importance weights of tokens, [S], or of completions, [n]; 1 [] without a cap."""
        cap, engine = self.settings.vllm_importance_sampling_cap, micro_batch.per_target.get("engine_logps")
        if cap is None or engine is None:
            return old_logps.new_ones(())
        logs = old_logps - in_float64(engine).to(old_logps)
        if self.settings.by_sequence:
            logs = by_sequence(logs, micro_batch)
        return logs.exp().clamp(max=cap)

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, and means over the tokens.

        ``entropy`` is that of the policy, estimated on the sampled tokens; ``kl`` the KL to the reference model;
        ``log_ratio`` the distance from the policy that sampled; ``clip_ratio/low`` and ``high`` the fractions of tokens
        whose ratio is clipped, which have no gradient; ``sampling/capped_ratio`` that of tokens whose importance weight
        is ``vllm_importance_sampling_cap``.
        """
        (divisor,) = self.divisors(batch)
        num_tokens = max(1.0, batch.target_weights.sum())
        names = ("entropy", "kl", "log_ratio", "clip_ratio/low", "clip_ratio/high", "sampling/capped_ratio")
        means = dict(zip(names, (value / num_tokens for value in sums[1:]), strict=True))
        if not self.settings.beta:
            del means["kl"]
        if not self.settings.vllm_importance_sampling_cap:
            del means["sampling/capped_ratio"]
        return {"loss": sums[0] / divisor, **means}


def _surrogate(ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.min(ratios * advantages, ratios.clamp(low, high) * advantages)
