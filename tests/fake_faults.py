"""Faults to inject into a simulation: each is a kind that fake GPUs must name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import benchmarks.simulation.fake_tensors as fake_tensors
import kit.strategy.accelerator
from kit.data.feed.batches import MicroBatch
from kit.train.objective import OBJECTIVES, SupervisedLoss


def _tensor_on_cpu() -> None:
    """The weights of the loss stay on the host."""
    to = MicroBatch.to

    def moved(self: MicroBatch, device: torch.device) -> MicroBatch:
        there = to(self, device)
        object.__setattr__(there, "weights", self.weights)
        return there

    MicroBatch.to = moved  # type: ignore[method-assign]


def _item_in_loop() -> None:
    """The loss of each micro-batch is read."""

    class Reading(SupervisedLoss):
        def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
            losses.sum().item()
            return super().terms(losses, micro_batch)

    OBJECTIVES["sft"] = Reading


def _unpinned() -> None:
    """Batches are copied from pageable memory."""
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment]


def _wide_base() -> None:
    """The frozen weights are loaded in float32."""
    make_model = fake_tensors.make_model

    def wide(*args: Any, **options: Any) -> Any:
        return make_model(*args, **options | {"dtype": torch.float32})

    fake_tensors.AutoModelForCausalLM.from_pretrained = wide


def _whole_gradients() -> None:
    """FSDP2 reduces no gradient before the last micro-batch."""
    start = kit.strategy.accelerator.start

    def started(*args: Any) -> Any:
        accelerator, plan = start(*args)
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = False
        return accelerator, plan

    kit.strategy.accelerator.start = started


FAULTS: dict[str, Callable[[], None]] = {
    "tensor_on_cpu": _tensor_on_cpu,
    "item_in_loop": _item_in_loop,
    "unpinned": _unpinned,
    "wide_base": _wide_base,
    "whole_gradients": _whole_gradients,
}
