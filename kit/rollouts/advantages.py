"""Advantages: how much better a completion is than the mean of its group."""

import numpy as np

_STD_FLOOR = 1e-4  # added to a standard deviation, which may be 0


def advantages(rewards: np.ndarray, policy_loss: str) -> np.ndarray:
    """Return the advantage of each completion in its group, float64 [P, G], from rewards [P, G]; NaN: no reward.

    - rloo: A_i = r_i - mean of the others. Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.3.
    - dr_grpo: A_i = r_i - mean. Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    - else A_i = (r_i - mean) / std. Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.

    A completion without a reward is left out of its group, and its advantage is 0. So are those of a group with zero
    reward variance.
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
    if policy_loss == "dr_grpo":
        return centred
    variance = np.square(centred).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
    return centred / (np.sqrt(variance) + _STD_FLOOR)
