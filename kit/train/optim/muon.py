"""Muon for the matrices of a model's layers, and AdamW for all other weights: ``optim: muon``.

The momentum of a matrix is orthogonalised before it moves the matrix: by torch's iteration, in bf16, with the settings
of ``torch.optim.Muon``. The rate is scaled by 0.2 sqrt(max(rows, columns)) (``adjust_lr_fn="match_rms_adamw"``; Liu et
al. 2025, arXiv:2502.16982), so that an update is as large as AdamW's, and one ``learning_rate`` serves all weights.

Promises: in one process each bit is that of ``torch.optim.Muon``. Under FSDP2 each rank gathers one matrix after the
other and iterates on the whole of it, so all ranks compute the same as one process would.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from kit.model.adapters.targets import layer_matrices
from kit.strategy.weights import own_part, own_start, whole_tensor
from kit.train.optim.optim import AdamW

if TYPE_CHECKING:
    from kit.config.settings.optimisation import OptimSettings


class Muon(torch.optim.Muon):
    """torch's, which also updates matrices that FSDP2 shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient. Called by all ranks."""
        assert closure is None
        for group in self.param_groups:
            lists: tuple[list[Any], ...] = ([], [], [])  # weights, gradients and momenta, sharded if the model is
            self._init_group(group, *lists)
            for weight, gradient, momentum in zip(*lists, strict=True):
                own_part(momentum).lerp_(own_part(gradient), 1 - group["momentum"])
                self._update(weight, gradient.lerp(momentum, group["momentum"]), group)

    def _update(self, weight: Any, direction: Any, group: dict[str, Any]) -> None:
        """Update a matrix.

        Args:
            direction: the gradient, mixed with its momentum by Nesterov's rule; sharded as ``weight``.
        """
        whole = whole_tensor(direction.bfloat16())  # the iteration begins so, too
        whole = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        part = own_part(weight)
        first = own_start(weight) // weight.shape[1]
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape)
        part.mul_(1 - group["lr"] * group["weight_decay"])
        part.add_(whole[first : first + part.shape[0]].to(part.device), alpha=-rate)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser, with their parameter groups and states."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """
        Args:
            optimizers: each with weights of its own. Their defaults tell their groups apart.
        """
        self._optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None
        for optimizer in self._optimizers:
            # A checkpoint that is loaded replaces the groups and the states.
            optimizer.param_groups = [group for group in self.param_groups if optimizer.defaults.keys() <= group.keys()]
            optimizer.state = self.state
            optimizer.step()


def build(
    model: torch.nn.Module, groups: list[dict[str, Any]], settings: "OptimSettings", rate: float, seed: int
) -> MuonWithAdamW:
    """Build it, see ``kit.train.optim.optim.build_optimizer``. Of the groups it takes the matrices of layers out."""
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    matrices = layer_matrices(model)
    by_rate: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in matrices:
        by_rate.setdefault(rates[parameter], []).append(parameter)
    of_rates = [{"params": parameters, "lr": each} for each, parameters in by_rate.items()]
    muon = Muon(of_rates, lr=rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    ids = {id(parameter) for parameter in matrices}
    rest = [group | {"params": [p for p in group["params"] if id(p) not in ids]} for group in groups]
    rest = [group for group in rest if group["params"]]
    adamw = [AdamW(rest, lr=rate, betas=settings.adam_betas, eps=settings.adam_epsilon)] if rest else []
    return MuonWithAdamW(muon, *adamw)
