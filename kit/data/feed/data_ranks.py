"""Data-parallel ranks: the part of each global batch that a process computes.

Code that deals data uses data ranks, not the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ranks:
    """The data rank of this process, and the number of data ranks.

    The number of processes may be larger: processes that compute one sample together share a data rank, and each of
    them computes the same numbers of it.
    """

    index: int = 0
    count: int = 1
    # Sums a tensor over all data ranks. All processes call it with the same shape; the result is on its device.
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    part: int = 0  # of each row, which this process computes: from 0
    num_parts: int = 1

    @property
    def num_processes(self) -> int:
        """The number of processes of all data ranks."""
        return self.count * self.num_parts
