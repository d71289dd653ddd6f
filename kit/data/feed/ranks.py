"""Which share of each global batch a process computes. Whoever deals data asks this, never how many processes run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def _alone(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


@dataclass(frozen=True)
class Ranks:
    """The data rank of this process, and how many there are.

    The number of processes may be larger: processes that compute one sample together have one data rank.
    """

    index: int = 0
    count: int = 1
    # Adds float64 arrays of one shape over all data ranks; called by all of them.
    sum: Callable[[np.ndarray], np.ndarray] = _alone
