"""Label the storages of a run for a meter: weights, gradients, optimiser state. For fake tensors and real ones."""

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.simulation.gradients import all_gradients
from benchmarks.simulation.meter import Meter
from benchmarks.simulation.storages import GRADIENTS
from kit.model.experts.mxfp4 import Mxfp4Experts

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

BACKWARD = "backward"  # the moment before a backward pass


def label_frozen(meter: Meter, model: torch.nn.Module, component: str) -> None:
    """Label all weights of a model that is there beside."""
    meter.hold([*model.parameters(), *model.buffers()], component)
    _label_4bit(meter, model, component)


def _label_4bit(meter: Meter, model: torch.nn.Module, component: str) -> None:
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            tables = [value for part in (state, state.state2) for value in vars(part).values()]
            meter.hold([module.weight, *tables], component)
        elif isinstance(module, Mxfp4Experts):
            meter.hold([module.weight], component)


def label_storages(meter: Meter, prepared: "Prepared") -> None:
    """Label the weights of a run, and its gradients and optimiser state from now on; mark ``BACKWARD``."""
    model, optimizer = prepared.model, prepared.optimizer
    assert optimizer is not None
    for parameter in model.parameters():
        meter.hold([parameter], "trainable weights" if parameter.requires_grad else "frozen weights")
    _label_4bit(meter, model, "4-bit weights")
    meter.hold(model.buffers(), "buffers")
    backward = prepared.accelerator.backward

    def labelling_backward(loss: torch.Tensor, **kwargs: Any) -> None:
        meter.mark(BACKWARD)
        backward(loss, **kwargs)
        meter.hold(all_gradients(model), GRADIENTS)

    prepared.accelerator.backward = labelling_backward

    def label_state(*args: Any) -> None:
        for state in optimizer.state.values():
            meter.hold(state.values(), "optimiser")

    getattr(optimizer, "optimizer", optimizer).register_step_post_hook(label_state)  # Accelerate's has none
