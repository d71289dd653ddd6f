"""Build the optimiser for the trainable weights, and set the learning rate of each parameter group.

Promises: a parameter group keeps its learning-rate multiplier: the rate with which the group was made, divided by the
peak rate. So a resume needs no saved state.
"""

import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from kit.config.optimisers import OPTIMISERS
from kit.model.adapters.freeze import parts_of
from kit.strategy.weights import own_parts
from kit.system.errors import UserError

if TYPE_CHECKING:
    from kit.config.settings.optimisation import OptimSettings

_MULTIPLIER = "rate_factor"  # of a group; torch keeps keys of a group that it does not know


class AdamW(torch.optim.AdamW):
    """torch's, which updates this rank's parts of sharded weights as plain tensors.

    The bits are the same. The host spends tens of milliseconds on an update of some hundred DTensors, and one on that
    of their parts.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Fill the lists of weights, gradients, moments and steps; called by torch for each update."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = own_parts(tensors)
        return has_complex


def build_optimizer(
    model: torch.nn.Module, settings: "OptimSettings", peak_learning_rate: float, seed: int = 0
) -> torch.optim.Optimizer:
    """Build the optimiser of the trainable weights. Norms and biases get no weight decay.

    With ``loraplus_lr_ratio`` the learning rate of the B matrices is so many times higher (LoRA+, Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354), and with them DoRA's vectors, as in peft. ``embedding_learning_rate`` is the rate
    of all that trains of embedding and head, also of their adapters; those of encoder and projector likewise.

    Args:
        peak_learning_rate: the rate of a group that names no ``lr``; see ``keep_lr_multipliers`` for one that does.
        seed: of an optimiser that draws random bits.

    Raises ``UserError`` if nothing trains that a rate is for.
    """
    rates = _rates(model, settings, peak_learning_rate)
    by_group: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for parameter, rate in rates.items():
        by_group.setdefault((parameter.ndim <= 1, rate), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": by_group[is_vector, rate], "weight_decay": 0.0 if is_vector else settings.weight_decay, "lr": rate}
        for is_vector, rate in sorted(by_group)
    ]
    module, _, name = OPTIMISERS[settings.optim].build.rpartition(".")
    build = getattr(importlib.import_module(module), name)
    optimizer: torch.optim.Optimizer = build(model, groups, settings, peak_learning_rate, seed)
    return optimizer


def torch_adamw(
    model: torch.nn.Module, groups: list[dict[str, Any]], settings: "OptimSettings", rate: float, seed: int
) -> torch.optim.Optimizer:
    """Build AdamW of torch."""
    # None: on a GPU torch updates all weights in a few calls, on a CPU one after another. False: always the latter.
    fused = True if settings.optim == "adamw_torch_fused" else None
    return AdamW(groups, lr=rate, betas=settings.adam_betas, eps=settings.adam_epsilon, fused=fused)


def of_bitsandbytes(
    model: torch.nn.Module, groups: list[dict[str, Any]], settings: "OptimSettings", rate: float, seed: int
) -> torch.optim.Optimizer:
    """Build an optimiser of bitsandbytes."""
    import bitsandbytes.optim

    name = OPTIMISERS[settings.optim].bitsandbytes
    options = {} if name.startswith("Lion") else {"eps": settings.adam_epsilon}
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(
        groups, lr=rate, betas=settings.adam_betas, **options
    )
    return optimizer


def _rates(model: Any, settings: "OptimSettings", peak_learning_rate: float) -> dict[torch.nn.Parameter, float]:
    """The peak rate of each trainable weight."""
    ratio = settings.loraplus_lr_ratio or 1.0
    rates = {
        parameter: peak_learning_rate * (ratio if "lora_B" in name or "lora_magnitude_vector" in name else 1.0)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    of_parts = {"vision": settings.vision_learning_rate, "projector": settings.projector_learning_rate}
    for of_part, rate in of_parts.items():
        if rate is None:
            continue
        named = [base.get_parameter(name) for name, part in parts_of(base).items() if part == of_part]
        if not (chosen := [parameter for parameter in named if parameter in rates]):
            raise UserError(f"{of_part}_learning_rate", f"given, but nothing of the {of_part} part trains")
        rates |= dict.fromkeys(chosen, rate)
    if settings.embedding_learning_rate:
        for table in (base.get_input_embeddings(), base.get_output_embeddings()):
            for parameter in table.parameters() if table is not None else ():
                if parameter.requires_grad:
                    rates[parameter] = settings.embedding_learning_rate
    return rates


def can_skip(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether ``step_unless`` works: a fused optimiser that has made its state, all of it on ``device``."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(optimizer.state) and optimizer.param_groups[0]["params"][0].device.type == device.type


def step_unless(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Update the weights unless ``found_inf``, a bool [] on their device, without a host synchronisation.

    If it is true, weights and state keep every bit. ``can_skip`` says of which optimisers this holds.
    """
    plain: Any = getattr(optimizer, "optimizer", optimizer)  # in Accelerate's wrapper
    plain.found_inf = found_inf.float()  # torch's name, by which its GradScaler does the same
    try:
        optimizer.step()
    finally:
        del plain.found_inf


def keep_lr_multipliers(optimizer: torch.optim.Optimizer, peak_learning_rate: float) -> list[str]:
    """Keep the learning-rate multiplier of each parameter group of a new optimiser: its rate, divided by the peak rate.

    Returns:
        A line with the multipliers; no line if all groups have the rate of the schedule.
    """
    sizes: Counter[float] = Counter()
    for group in optimizer.param_groups:
        group[_MULTIPLIER] = group["lr"] / peak_learning_rate
        sizes[group[_MULTIPLIER]] += sum(p.numel() for p in group["params"])
    if set(sizes) == {1.0}:
        return []
    parts = [f"x {multiplier:g} for {size:,}" for multiplier, size in sizes.items()]
    return [f"learning rate: the schedule's {', '.join(parts)} trainable parameters"]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group ``learning_rate`` times its multiplier, 1 unless ``keep_lr_multipliers`` found another."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_MULTIPLIER, 1.0)
