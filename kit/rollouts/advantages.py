"""Advantages: how much better a completion is than the mean of its group."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from kit.rollouts.trajectories import Trajectory

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings

_STD_FLOOR = 1e-4  # added to a standard deviation, which may be 0


def kl_in_reward(settings: "ObjectiveSettings") -> float:
    """Return the coefficient of the KL penalty that is subtracted from rewards; 0: none is."""
    return settings.reward_scale if settings.policy_loss == "rloo" else 0.0


def add_advantages(groups: Sequence[Sequence[Trajectory]], settings: "ObjectiveSettings") -> np.ndarray:
    """Set the advantages of a batch of groups, and return them, float64 [P, G].

    With rloo and ``beta``, once the log-probabilities are known: beta times log old - log reference of a completion is
    subtracted from its reward.
    """
    if settings.multi_objective_aggregation == "normalize_then_sum":
        none = [np.nan] * len(settings.rewards)
        of_each = [[each.rewards if np.isfinite(each.reward) else none for each in group] for group in groups]
        found = gdpo_advantages(np.array(of_each), settings.reward_weights or [1.0] * len(settings.rewards))
    else:
        beta = kl_in_reward(settings)
        rewards = np.array([[each.reward - beta * each.kl for each in group] for group in groups])
        found = advantages(rewards, settings.policy_loss, settings.scale_rewards)
    for each, value in zip(chain.from_iterable(groups), found.ravel().tolist(), strict=True):
        each.advantage = value
    return found


def advantages(rewards: np.ndarray, policy_loss: str, scale: str = "auto") -> np.ndarray:
    """Return the advantage of each completion in its group, float64 [P, G], from rewards [P, G]; NaN: no reward.

    - rloo: A_i = r_i - mean of the others. Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.3.
    - scale none: A_i = r_i - mean. Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    - scale group: A_i = (r_i - mean) / std. Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.
    - scale batch: the same with the standard deviation of all rewards. Liu et al. 2025,
      https://arxiv.org/abs/2508.08221.

    A completion without a reward is left out of its group, and its advantage is 0. So are those of a group with zero
    reward variance.

    Args:
        scale: auto: none with dr_grpo, else group.
    """
    known = np.isfinite(rewards)
    most = np.where(known, rewards, -np.inf).max(axis=1, keepdims=True)
    least = np.where(known, rewards, np.inf).min(axis=1, keepdims=True)
    count = np.maximum(known.sum(axis=1, keepdims=True), 1)
    centred = np.where(known, rewards, 0.0)
    # The mean of equal numbers may be rounded.
    centred = np.where(known & (most > least), centred - centred.sum(axis=1, keepdims=True) / count, 0.0)
    if policy_loss == "rloo":
        return centred * count / np.maximum(count - 1, 1)
    if scale == "none" or (scale == "auto" and policy_loss == "dr_grpo"):
        return centred
    if scale == "batch":
        return centred / (_std(rewards) + _STD_FLOOR)
    variance = np.square(centred).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
    return centred / (np.sqrt(variance) + _STD_FLOOR)


def gdpo_advantages(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the advantages of several rewards, float64 [P, G], from rewards [P, G, K]; NaN: no reward.

    Each reward has advantages of its own, scaled by group. Their weighted sum is divided by its standard deviation over
    the batch; its mean is 0 in each group. Liu et al. 2026, https://arxiv.org/abs/2601.05242.
    """
    known = np.isfinite(rewards).all(axis=2)  # [P, G]
    own = [advantages(np.where(known, each, np.nan), "dapo", "group") for each in np.moveaxis(rewards, 2, 0)]
    total = np.tensordot(weights, own, axes=1)
    return total / (_std(np.where(known, total, np.nan)) + _STD_FLOOR)


def _std(values: np.ndarray) -> float:
    """The standard deviation of the values that are known; 0 of one."""
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0
