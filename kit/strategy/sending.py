"""Broadcast a model's weights and buffers from rank 0, which alone has read them, to ranks that built it on meta.

Promises: a rank other than 0 never holds more than its shards, its buffers, the quantisation constants of its 4-bit
weights, and the tensor that is being sent. Rank 0 also holds unsharded embedding and head on its GPU while it shards.

accelerate can do this for weights, but not for persistent buffers, and transformers reads all weights on all ranks.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from kit.strategy.processes.rendezvous import from_main
from kit.strategy.weights import is_sharded, own_part, rank_and_world
from kit.system.errors import TrainingError

if TYPE_CHECKING:
    import torch


class Sender:
    """Sends the weights of a model that becomes sharded in between. Every rank creates one and makes the same calls."""

    def __init__(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
        """Give all tensors the dtype that they have on rank 0, before the model is sharded.

        Args:
            model: with its weights on rank 0, on meta on all other ranks.
            optimizer: of its trainable parameters.

        Raises:
            TrainingError: the ranks have built different models.
        """
        tensors = dict(_tensors(model))
        self._rank = rank_and_world()[0]
        states = _states(model)
        self._forms, settings, dtypes = from_main(
            lambda: (_forms(tensors), _generation_configs(model), {name: s.dtype for name, s in states.items()})
        )
        if {name: shape for name, (shape, _) in self._forms.items()} != {name: t.shape for name, t in tensors.items()}:
            raise TrainingError("rank 0 has built another model than this rank")
        # On rank 0; they outlive the sharding, which keeps only this rank's shards.
        self._whole = {name: tensor.detach() for name, tensor in tensors.items()} if self._rank == 0 else {}
        if self._rank:
            modules = dict(model.named_modules())
            for name, generation_config in settings.items():
                modules[name].generation_config = generation_config
            for name, tensor in tensors.items():
                tensor.data = tensor.data.to(self._forms[name][1])
            for name, dtype in dtypes.items():  # in which matmuls get the weight; its family may need another
                states[name].dtype = dtype
        names = {id(tensor): name for name, tensor in tensors.items()}
        self._groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def send(
        self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", device: "torch.device", offload: bool
    ) -> None:
        """Fill the sharded model.

        Args:
            device: on which this rank communicates, and keeps buffers.
            offload: keep parameters in CPU memory.
        """
        import torch
        from torch.distributed.tensor import distribute_tensor

        if self._rank:
            model.to_empty(device="cpu" if offload else device)
            for buffer in model.buffers():
                buffer.data = buffer.data.to(device)
        with torch.no_grad():
            for name, tensor in _tensors(model):
                shape, dtype = self._forms[name]
                if self._rank == 0:
                    whole = self._whole.pop(name).to(device).contiguous()
                else:
                    whole = torch.empty(shape, dtype=dtype, device=device)
                torch.distributed.broadcast(whole, src=0)
                if is_sharded(tensor):
                    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
                    whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                own_part(tensor).copy_(whole)
            for holder, name in _tables(model):
                table = getattr(holder, name)
                table = table.to(device).contiguous() if self._rank == 0 else torch.empty_like(table, device=device)
                torch.distributed.broadcast(table, src=0)
                setattr(holder, name, table)
        # accelerate finds an optimiser's parameters again by their addresses, which are all 0 on meta.
        parameters = dict(model.named_parameters())
        for group, names in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [parameters[name] for name in names]


def _tensors(model: "torch.nn.Module") -> "chain[tuple[str, torch.Tensor]]":
    """All parameters and buffers, also those outside the state dict; shared ones once."""
    return chain(model.named_parameters(), model.named_buffers())


def _tables(model: "torch.nn.Module") -> Iterator[tuple[Any, str]]:
    """All quantisation constants of 4-bit weights, neither sharded nor buffers: the holder of each, and its name."""
    for state in _states(model).values():
        yield from ((state, name) for name in ("absmax", "code", "offset"))
        yield from ((state.state2, name) for name in ("absmax", "code"))


def _states(model: "torch.nn.Module") -> dict[str, Any]:
    """bitsandbytes' state of each 4-bit weight, by the name of its module."""
    states = {name: getattr(module, "quant_state", None) for name, module in model.named_modules()}
    return {name: state for name, state in states.items() if state is not None}


def _forms(tensors: "dict[str, torch.Tensor]") -> "dict[str, tuple[torch.Size, torch.dtype]]":
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _generation_configs(model: "torch.nn.Module") -> dict[str, Any]:
    """Generation configs, read from files next to the weights, by the name of their module."""
    return {
        name: module.generation_config for name, module in model.named_modules() if "generation_config" in vars(module)
    }
