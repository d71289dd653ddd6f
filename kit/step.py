"""One optimiser step: micro-batches in, exact global loss and gradient norm out.

The loss of a step is the sum over all supervised tokens of the global batch divided by their number. Every rank
knows that number from the data order, so nothing is counted over ranks and no mean of means can arise.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from kit.errors import TrainingError
from kit.strategy import clip_grad_norm

if TYPE_CHECKING:
    from accelerate import Accelerator


def train_step(
    accelerator: "Accelerator",
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
    num_targets: int,
    learning_rate: float,
    max_grad_norm: float,
) -> tuple[float, float]:
    """Accumulate, clip, step.

    Args:
        micro_batches: this rank's share of the global batch, equally many on every rank.
        num_targets: supervised tokens of the whole global batch, over all ranks.

    Returns:
        Loss in nats per supervised token, and the gradient norm before clipping; the same on every rank.

    Raises:
        TrainingError: one of the two is not finite; weights and moments are as before the step.
    """
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    # DDP and FSDP average gradients over ranks; the objective is a sum over all of them.
    scale = accelerator.num_processes / num_targets
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            loss_sum = model(**to_device(batch, accelerator.device))  # []
            accelerator.backward(loss_sum * scale)
        total += loss_sum.detach()
    total = accelerator.reduce(total, reduction="sum")
    norm = clip_grad_norm(accelerator, model, max_grad_norm)
    loss_value, norm_value = torch.stack([total / num_targets, norm.double()]).tolist()
    if not (np.isfinite(loss_value) and np.isfinite(norm_value)):
        optimizer.zero_grad()
        raise TrainingError(f"loss {loss_value}, gradient norm {norm_value}")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return loss_value, norm_value


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Reseed all generators as a function of (seed, step, rank): dropout needs no saved state to resume exactly."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def to_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
