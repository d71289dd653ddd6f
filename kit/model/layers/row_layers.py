"""peft's layer for rows that train alone, computed without a copy of the whole table.

peft writes the rows into a copy of the table at every call, and in the backward pass forms the gradient of all of it.
At 128,000 tokens of 4,096 in bf16 that is a gigabyte each, again for every chunk of the loss. Here the table is used as
it is, and only what comes from the rows is replaced. Results are the same, and so are the names and tensors saved. One
gradient differs: a row at the embedding's ``padding_idx`` trains here, and does not in peft.
"""

from collections import defaultdict
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper


class _RowLayer(TrainableTokensLayer):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """An embedding's vectors [..., h] for ids [...], or a head's logits [..., V] for hidden states [..., h]."""
        adapters = self.active_adapters
        if self.disable_adapters or self.merged or len(adapters) != 1 or adapters[0] not in self.token_indices:
            return super().forward(x, *args, **kwargs)
        table = self.base_layer
        rows = self.trainable_tokens_delta[adapters[0]].to(table.weight.dtype)  # [n, h]
        ids = self._ids(adapters[0], x.device)  # [n]
        if isinstance(table, torch.nn.Embedding):
            match = x.unsqueeze(-1) == ids  # [..., n]
            vectors = F.embedding(match.int().argmax(-1), rows)
            scale = self._get_embed_scale()
            if scale is not None:
                vectors = vectors * scale.to(vectors.dtype)
            output = table(x)
            return torch.where(match.any(-1, keepdim=True), vectors.to(output.dtype), output)
        output = table(x)
        return output.index_copy_(-1, ids, F.linear(x, rows).to(output.dtype))

    def _ids(self, adapter: str, device: torch.device) -> torch.Tensor:
        """The ids of the rows, made once for each device: making them at each call would wait for the device."""
        cache = self.__dict__.setdefault("_ids_on", {})
        if (adapter, device) not in cache:
            cache[adapter, device] = torch.tensor(self.token_indices[adapter], device=device)
        return cache[adapter, device]


class _RowWrapper(TrainableTokensWrapper):
    def _getattr_wrapped(self, name: str, modules: Any) -> Any:
        # The parameter, not a copy with the rows in it: callers want its dtype, or whether it is tied.
        return modules["token_adapter"].base_layer.weight


def install_row_layers(base: Any) -> None:
    """Let the rows of an adapted model be computed by the layers of this module.

    Args:
        base: the model inside peft's.
    """
    for module in base.modules():
        if type(module) is TrainableTokensLayer:
            module.__class__ = _RowLayer
        elif type(module) is TrainableTokensWrapper:
            module.__class__ = _RowWrapper


def keep_ties(base: Any) -> None:
    """Let ``tie_weights`` of an adapted model tie the weights that are tied now.

    The model's own ``tie_weights`` looks for them under names that peft's wrappers change.

    Args:
        base: the model inside peft's.
    """
    owners = defaultdict(list)  # of each parameter: its modules, and its name in each
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners[parameter].append((module, name))
    tied = [places for places in owners.values() if len(places) > 1]

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        for places in tied:
            module, name = places[0]
            for other_module, other_name in places[1:]:
                setattr(other_module, other_name, getattr(module, name))

    if tied:
        base.tie_weights = MethodType(tie_weights, base)
