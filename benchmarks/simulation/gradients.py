"""All gradients that a process holds, those too that FSDP2 has not reduced."""

import torch
from torch.distributed.fsdp import FSDPModule


def all_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return all gradients, also those that FSDP2 has not reduced yet."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    unreduced = [
        gradient
        for unit in units
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for p in group.fsdp_params
        for gradient in (p.unsharded_accumulated_grad, getattr(getattr(p, "_unsharded_param", None), "grad", None))
    ]
    # Of hybrid sharding: reduced within this rank's group, but not yet added to those of the other copies.
    partial = [group._partial_reduce_output for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    own = [p.grad for p in model.parameters()]
    return [gradient for gradient in (*own, *unreduced, *partial) if gradient is not None]
