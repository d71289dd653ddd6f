"""Fused experts in MXFP4, as the files of gpt-oss hold them: ``qlora`` trains on these weights, not on rounded ones.

Promises: the plain weights have the bits that transformers reads with ``Mxfp4Config(dequantize=True)``.
"""

from collections.abc import Callable
from typing import Any

import torch

from kit.model.experts.packed import PackedExperts

GROUP = 32  # weights that share a scale
GROUP_BYTES = GROUP // 2 + 1


class Mxfp4Experts(PackedExperts):
    """Weights [E, in, out] in MXFP4, values and scales in one parameter, which is sharded as a whole."""

    def __init__(self, groups: torch.Tensor, storage: torch.dtype) -> None:
        """Keep groups as numbers of the dtype ``storage``: sharding casts no parameter of it.

        Args:
            groups: bytes [E, out, in / 32, 17]: 16 of the files' ``blocks``, and one of their ``scales``.
            storage: the compute dtype.
        """
        weight = groups.reshape(-1).view(storage).unsqueeze(1)
        super().__init__(torch.nn.Parameter(weight, requires_grad=False))
        number, out, in_groups, _ = groups.shape
        self.shape = torch.Size([number, in_groups * GROUP, out])

    def dequantiser(self, values: torch.Tensor, dtype: torch.dtype) -> Callable[[slice], torch.Tensor]:
        """See ``PackedExperts``."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        number, rows, columns = self.shape
        groups = values.view(number, columns, rows // GROUP, GROUP_BYTES)

        def plain(experts: slice) -> Any:
            part = groups[experts]
            return convert_moe_packed_tensors(part[..., :-1].contiguous(), part[..., -1].contiguous(), dtype=dtype)

        return plain
