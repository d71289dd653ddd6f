"""One optimiser step: micro-batches in, exact global loss and gradient norm out.

The loss of a step is the weighted sum over all supervised tokens of the global batch divided by the sum of their
weights, which are 1 as a rule. Every rank knows that sum before the step, so no mean of means can arise.
"""

import math
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from kit.data.feed.feed import by_file
from kit.errors import Problem, TrainingError, UserError
from kit.strategy.accelerator import clip_grad_norm, settle

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.data.feed.feed import GlobalBatch


@dataclass(frozen=True)
class StepResult:
    """The same on every rank; losses in nats per supervised token, weighted as the tokens are."""

    loss: float
    grad_norm: float  # before clipping
    losses: list[float]  # of each source; NaN for one that had no target in this step
    stop: bool = False  # whether any rank was asked to stop

    @property
    def is_finite(self) -> bool:
        """If not, weights and moments are as before the step."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def values(self) -> str:
        return f"loss {self.loss}, gradient norm {self.grad_norm}"


def train_step(
    accelerator: "Accelerator",
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: "GlobalBatch",
    learning_rate: float,
    max_grad_norm: float,
    stop: bool = False,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Accumulate, clip, step; without the last where loss or gradient norm is not finite.

    Args:
        stop: this rank was asked to stop; ``StepResult.stop`` says on all ranks whether any was.
        before_update: called when the gradients are as the optimiser will use them.
    """
    num_sources, total_weight = len(batch.target_weights), batch.target_weights.sum()
    sums = torch.zeros(num_sources, dtype=torch.float64, device=accelerator.device)  # of weighted nats
    # DDP and FSDP average gradients over ranks; the objective is a sum over all of them.
    scale = accelerator.num_processes / total_weight
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        inputs = to_device(micro_batch, accelerator.device)
        weights, sources = inputs.pop("weights"), inputs.pop("sources")
        with nullcontext() if last else accelerator.no_sync(model):
            losses = model(**inputs) * weights  # [S]
            accelerator.backward(losses.sum() * scale)
        sums += losses.detach().double() @ F.one_hot(sources, num_sources).double()
    asked = torch.full((1,), float(stop), dtype=torch.float64, device=accelerator.device)
    sums = accelerator.reduce(torch.cat([sums, asked]), reduction="sum")
    norm = clip_grad_norm(accelerator, model, max_grad_norm)
    *by_source, num_asked, norm_value = torch.cat([sums, norm.double().reshape(1)]).tolist()
    loss_value = sum(by_source) / total_weight
    shares = [
        value / weight if weight else math.nan for value, weight in zip(by_source, batch.target_weights, strict=True)
    ]
    result = StepResult(loss_value, norm_value, shares, stop=num_asked > 0)
    if before_update is not None:
        before_update()
    if result.is_finite:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad()
    return result


def nonfinite(step: int, result: StepResult, batch: "GlobalBatch") -> TrainingError:
    """What to tell of a step whose loss or gradient norm is not finite, where the run is to end with it."""
    return TrainingError(
        f"step {step}: {result.values}; weights are as before it. Samples: {by_file(batch.origins)}\n"
        "    -> the same command comes to the same step again: mend or remove the sample at fault, or train with\n"
        "       another learning_rate or mixed_precision; --max_nonfinite_steps N skips up to N such steps in a row"
    )


def settle_strategy(accelerator: "Accelerator", model: torch.nn.Module, batch: "GlobalBatch") -> None:
    """``strategy.settle`` with what this rank is given first; nothing is learned from it."""
    inputs = to_device(batch.micro_batches[0], accelerator.device)
    settle(accelerator, model, {name: value for name, value in inputs.items() if name not in ("weights", "sources")})


def check_isolation(accelerator: "Accelerator", model: torch.nn.Module, vocab_size: int) -> None:
    """Refuse a model in which the samples of a pack see each other; called by all ranks.

    Two packs of two samples differ in the first one only. The second sample's losses are the same in both, or else
    something went from one to the other: attention without bounds, a convolution, a recurrent state.

    Raises:
        UserError: ``packing`` cannot be used with this model.
    """
    length = 16
    tokens = np.random.default_rng(0).integers(vocab_size, size=(3, length))
    positions = torch.arange(length).repeat(2)[None]
    bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    targets = torch.from_numpy(tokens[2, 1:])

    def losses(first: np.ndarray) -> torch.Tensor:
        batch = {
            "input_ids": torch.from_numpy(np.concatenate([first, tokens[2]]))[None],
            "position_ids": positions,
            "target_positions": torch.arange(length, 2 * length - 1),
            "targets": targets,
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
            **dict.fromkeys(("max_length_q", "max_length_k"), length),
        }
        return model(**to_device(batch, accelerator.device))

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            difference = (losses(tokens[0]) - losses(tokens[1])).abs().max().item()
    except (ValueError, TypeError, AttributeError) as error:
        found = f"this model takes no packs ({str(error).splitlines()[0]})"
        raise UserError(Problem("packing", found, fix="do without packing")) from None
    model.train(was_training)
    # The same shapes give the same bits, but for experts, whose batches differ with what is routed to them.
    if not difference < (1e-4 if accelerator.mixed_precision == "no" else 2e-2):
        found = f"samples of a pack see each other in this model (losses differ by {difference:.2g})"
        raise UserError(Problem("packing", found, "the same losses whatever comes before", "do without packing"))


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Reseed all generators as a function of (seed, step, rank): dropout needs no saved state to resume exactly."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on ``device``."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
