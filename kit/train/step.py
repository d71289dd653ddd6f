"""One optimiser step, with the exact loss and gradient norm of the global batch.

Every rank knows before the step by which numbers the sums over the global batch are divided (see
``kit.train.step_loss``). So the result is the same on every topology, except for rounding.

The host waits for the device once a step, for numbers whose copy begins before the update. A fused optimiser needs none
of them: it gets its work at once, and skips the update on the device if a number is not finite.
"""

import functools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.feed.batches import on_device
from kit.model.adapters.reach import parents
from kit.model.layers.embedding_noise import EmbeddingNoise
from kit.strategy.float64 import float64_device, in_float64
from kit.strategy.gradients import accumulating, clear_gradients, clip_grad_norm, rebuild_ddp_buckets
from kit.strategy.weights import own_part, plain_name
from kit.system.console import say
from kit.system.errors import UserError, listed
from kit.train.optim.optim import can_skip, set_learning_rate, step_unless
from kit.train.step_loss import StepLoss

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.data.feed.feed import GlobalBatch
    from kit.strategy.accelerator import Prepared


@dataclass(frozen=True)
class StepResult:
    """The result of a step; the same on every rank."""

    loss: float  # the number that the objective minimised
    grad_norm: float  # global gradient norm before clipping
    metrics: dict[str, float] = field(default_factory=dict)  # the objective's other metrics
    stop: bool = False  # whether any rank was asked to stop
    save: bool = False  # whether any rank asked for a save
    objective: str = "SupervisedLoss"  # the class of the objective; only this one's loss compares with eval_loss
    loss_scale: float | None = None  # that of this step; None: the loss is not scaled
    # Whether every number of which loss and metrics are made is finite. A metric may leave one out.
    sums_are_finite: bool = True

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite. If not, the step changed neither weights nor optimiser state."""
        return self.sums_are_finite and math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether fp16 could not hold the scaled gradients, and nothing else is wrong."""
        losses_are_finite = self.sums_are_finite and math.isfinite(self.loss)
        return self.loss_scale is not None and losses_are_finite and not math.isfinite(self.grad_norm)

    @property
    def values(self) -> str:
        """Loss and gradient norm, and metrics that are not finite, as a string for a message."""
        others = [f", {name} {value}" for name, value in self.metrics.items() if not math.isfinite(value)]
        return f"loss {self.loss}, gradient norm {self.grad_norm}{''.join(others)}"


def train_step(
    prepared: "Prepared",
    objective: StepLoss,
    batch: "GlobalBatch",
    learning_rate: float,
    max_grad_norm: float,
    *,
    loss_scale: float | None = None,
    noise: EmbeddingNoise | None = None,
    asks_to_stop: Callable[[], bool] = lambda: False,
    asks_to_save: Callable[[], bool] = lambda: False,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Accumulate the gradients of all micro-batches, clip them, and update the weights. Called by all ranks.

    If the gradient norm or a sum of the objective is not finite, the weights are not updated.

    Args:
        learning_rate: of the schedule; each parameter group multiplies it (``keep_lr_multipliers``).
        max_grad_norm: clip the global gradient norm to this; 0: do not clip.
        loss_scale: a power of 2, see ``kit.train.loss_scaling``; None: the loss is not scaled.
        noise: added to the input embeddings.
        asks_to_stop: whether this rank was asked to stop; called after the gradients were computed. ``StepResult.stop``
            says on all ranks whether any rank was.
        asks_to_save: whether this rank asks for a save, in the same way.
        before_update: called after clipping, when the gradients are final.

    Raises:
        UserError: trainable weights get no gradient; nothing is updated.
    """
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    assert optimizer is not None, "a step needs an optimiser"
    batch = objective.begin_step(prepared, batch)
    # DDP and FSDP average the gradients over the processes, but each term of the objective is a sum over data ranks,
    # and ranks of one sequence-parallel group have each a part of its gradient.
    num_processes = prepared.ranks.num_processes
    scales = [num_processes / divisor for divisor in objective.divisors(batch)]
    # Divided by what the terms are multiplied by, so that the same gradients overflow on every number of processes.
    backward_scale = 1.0 if loss_scale is None else loss_scale / num_processes
    numbers = []  # for the metrics, float64 [n] of each micro-batch
    # Each micro-batch's part of the mean of the routers' losses, weighted by the targets. They are no sums over tokens,
    # so this mean depends on how the global batch is cut into micro-batches.
    router_parts: list[torch.Tensor] = []
    total_weight = float(batch.target_weights.sum())
    for i, micro_batch in enumerate(on_device(batch.micro_batches, accelerator.device), start=1):
        is_last = i == len(batch.micro_batches)
        with accumulating(accelerator, model, is_last):
            losses, router_loss = model(**_inputs(objective, micro_batch, noise), with_router_loss=True)
            if not losses.requires_grad:
                raise _no_gradient()
            terms, of_micro_batch = objective.terms(losses, micro_batch)
            minimised = sum(term * scale for term, scale in zip(terms, scales, strict=True))
            if router_loss is not None:
                part = router_loss * (micro_batch.weights.sum() / total_weight)
                router_parts.append(in_float64(part.detach()))
                minimised = minimised + part * num_processes
            accelerator.backward(minimised if loss_scale is None else minimised * backward_scale)
        numbers.append(of_micro_batch)
    # Filled on the device: a copy of numbers from the host would wait for it.
    kind: dict[str, Any] = {"dtype": torch.float64, "device": float64_device(accelerator.device)}
    of_routers = sum(router_parts, start=torch.zeros((), **kind))
    asked = [torch.full((), float(asks()), **kind) for asks in (asks_to_stop, asks_to_save)]
    # One collective for everything that is summed over the ranks.
    sums = prepared.ranks.sum(torch.cat([functools.reduce(torch.add, numbers), torch.stack([of_routers, *asked])]))
    norm = clip_grad_norm(model, prepared.trained, max_grad_norm, backward_scale)
    # With offloaded weights the norm is on the CPU, and the optimiser too.
    known = torch.cat([sums, in_float64(norm).to(sums).reshape(1)])
    # The only synchronisation of the host with the device, but for ``in_float64`` on MPS.
    read = _begin_to_read(known)
    if prepared.ranks.num_processes > 1:
        _check_gradients(prepared)
    before_update()
    set_learning_rate(optimizer, learning_rate)
    if can_skip(optimizer, known.device):
        step_unless(optimizer, ~torch.isfinite(known).all())
    elif all(map(math.isfinite, read())):
        if not optimizer.state:  # the first update, so that skipped steps before it report nothing
            _check_gradients(prepared)
            _report_still_adapters(prepared)
        optimizer.step()
    clear_gradients(accelerator, prepared.trained)
    *values, router_loss, num_stop_requests, num_save_requests, grad_norm = read()
    metrics = objective.metrics(values, batch)
    if router_parts:
        metrics["loss"] += router_loss
        metrics["router_loss"] = router_loss
    return StepResult(
        loss=metrics.pop("loss"),
        grad_norm=grad_norm,
        metrics=metrics,
        stop=num_stop_requests > 0,
        save=num_save_requests > 0,
        objective=type(objective).__name__,
        loss_scale=loss_scale,
        sums_are_finite=all(map(math.isfinite, values)),
    )


def _begin_to_read(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy ``numbers`` to the host. Returns what waits for them: not for work that the device got since."""
    copy = numbers.to("cpu", non_blocking=True)
    if numbers.device.type == "cpu":
        return copy.tolist
    copied = torch.get_device_module(numbers.device).Event()
    copied.record()

    @functools.cache
    def read() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return read


def _inputs(objective: StepLoss, micro_batch: "MicroBatch", noise: EmbeddingNoise | None) -> dict[str, Any]:
    """The keyword arguments of the model for ``micro_batch``, with functions of its embeddings and its logits."""
    inputs = micro_batch.model_inputs()
    if noise is not None:
        inputs["change_embeddings"] = functools.partial(noise.add, micro_batch.segments)
    if objective.target_values is not None:
        # In a `partial`, its tensors keep their dtype: FSDP casts those that it finds among the arguments to bf16.
        inputs["target_values"] = functools.partial(objective.target_values, micro_batch)
    return inputs


def _check_gradients(prepared: "Prepared") -> None:
    """Refuse trainable weights without a gradient. On one process, warn of some at the first update instead.

    With several processes, the others would wait for that gradient. An empty tensor needs none: it is this rank's share
    of a weight that other ranks hold.
    """
    optimizer = prepared.optimizer
    assert optimizer is not None, "a step needs an optimiser"
    if all(p.grad is not None or p.numel() == 0 for p in prepared.trained):  # in each step, so without the names
        return
    named = [(plain_name(name), p) for name, p in prepared.model.named_parameters() if p.requires_grad]
    without = [name for name, p in named if p.grad is None and p.numel()]
    if not without:
        return
    found = f"no gradient reaches {len(without)} of {len(named)} trainable weights: {', '.join(without[:3])}"
    if prepared.ranks.num_processes == 1 and len(without) < len(named):
        say(f"warning: {found}; they stay as they are until a batch reaches them")
        return
    if len(without) == len(named):  # as torch 2.11 compiles 4-bit layers
        fix = "--torch_compile false, if it is true; else train weights on which the loss depends"
        raise UserError("method", f"{found}: nothing would be learned", fix=fix)
    found += "; other processes would wait for it"
    if any(name.startswith("base_model.") for name in without):  # as peft names them
        raise UserError("lora_target_modules", found, "modules that every batch reaches")
    reached = {parent for name, _ in named if name not in without for parent in parents(name)}
    patterns = [next((f"{parent}.*" for parent in parents(name) if parent not in reached), name) for name in without]
    raise UserError("freeze", found, fix=f"add to --freeze: {','.join(dict.fromkeys(patterns))}")


def _report_still_adapters(prepared: "Prepared") -> None:
    """Warn of adapters that the first update leaves as they are: their gradients are zero on all ranks.

    Called by all ranks. On one process, adapters without a gradient are left to ``_check_gradients``.
    """
    if "peft" not in sys.modules:  # then there are none, and its import takes a second
        return
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    moves: dict[str, torch.Tensor] = {}  # by module: whether this rank's part of a gradient is other than zero
    device = prepared.accelerator.device
    for name, layer in prepared.model.named_modules():
        if not isinstance(layer, BaseTunerLayer) or isinstance(layer, TrainableTokensLayer):
            continue
        trained = [
            p for each in layer.adapter_layer_names for p in getattr(layer, each).parameters() if p.requires_grad
        ]
        gradients = [own_part(p.grad).any().to(device) for p in trained if p.grad is not None]
        is_alone = torch.tensor(prepared.ranks.num_processes == 1, device=device)
        module = plain_name(name).removeprefix("base_model.model.")
        moves[module] = torch.stack(gradients).any() if gradients else is_alone
    if not moves:
        return
    num_ranks = prepared.ranks.sum(in_float64(torch.stack(list(moves.values())))).tolist()
    still = [module for module, count in zip(moves, num_ranks, strict=True) if not count]
    if still:
        found = f"in the first step no gradient reached {len(still)} of {len(moves)} adapters: {listed(still)}"
        say(f"warning: {found}; they stay as they are until a batch reaches them")


def _no_gradient() -> UserError:
    found = "the loss depends on no trainable weight: layers of this model compute gradients in a way of their own"
    return UserError("method", found, fix="--method full")


def before_first_step(prepared: "Prepared", batch: "GlobalBatch") -> None:
    """Let DDP rebuild its gradient buckets, see ``rebuild_ddp_buckets``. Called by all ranks, before each step.

    Two backward passes with a loss of zero do it, on the first micro-batch; nothing is learned. Other strategies have
    no buckets, and nothing is computed there; nor before later steps of this process.
    """
    if prepared.has_stepped:
        return
    prepared.has_stepped = True
    inputs = batch.micro_batches[0].to(prepared.accelerator.device).model_inputs()

    def loss() -> torch.Tensor:
        losses, router_loss = prepared.model(**inputs, with_router_loss=True)
        return losses.sum() if router_loss is None else losses.sum() + router_loss

    check = functools.partial(_check_gradients, prepared)
    rebuild_ddp_buckets(prepared.accelerator, prepared.trained, loss, check)


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed all random generators by (seed, step, rank), so that dropout is the same after a resume."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    # Not by ``torch.manual_seed``, which turns to each kind of device that torch knows, for a millisecond.
    torch.default_generator.manual_seed(value)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(value)
