"""Which share of each global batch a process computes. Whoever deals data asks this, never how many processes run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ranks:
    """The data rank of this process, and how many there are.

    The number of processes may be larger: processes that compute one sample together have one data rank.
    """

    index: int = 0
    count: int = 1
    # Adds tensors of one shape over all data ranks, each of which calls it; gives the sum on the tensor's own device.
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
