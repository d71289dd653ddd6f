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


class _Rows(TrainableTokensLayer):
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
            chosen = F.embedding(match.int().argmax(-1), rows)
            if (scale := self._get_embed_scale()) is not None:
                chosen = chosen * scale.to(chosen.dtype)
            output = table(x)
            return torch.where(match.any(-1, keepdim=True), chosen.to(output.dtype), output)
        output = table(x)
        return output.index_copy_(-1, ids, F.linear(x, rows).to(output.dtype))

    def _ids(self, adapter: str, device: torch.device) -> torch.Tensor:
        """The ids of the rows, made once for each device: making them at each call would wait for the device."""
        cache = self.__dict__.setdefault("_ids_on", {})
        if (adapter, device) not in cache:
            cache[adapter, device] = torch.tensor(self.token_indices[adapter], device=device)
        return cache[adapter, device]


class _Wrapper(TrainableTokensWrapper):
    def _getattr_wrapped(self, name: str, modules: Any) -> Any:
        # The parameter, not a copy with the rows in it: who asks wants its dtype, or whether it is tied.
        return modules["token_adapter"].base_layer.weight


def improve(base: Any) -> None:
    """Let the rows of an adapted model be computed by this module, and keep tied weights tied when it is moved.

    Args:
        base: the model inside peft's.
    """
    for module in base.modules():
        if type(module) is TrainableTokensLayer:
            module.__class__ = _Rows
        elif type(module) is TrainableTokensWrapper:
            module.__class__ = _Wrapper
    # transformers looks for tied weights under names that peft's wrappers change.
    places = defaultdict(list)
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, name))
    shared = [owners for owners in places.values() if len(owners) > 1]

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        for (first, name), *others in shared:
            for module, other in others:
                setattr(module, other, getattr(first, name))

    if shared:
        base.tie_weights = MethodType(tie_weights, base)
