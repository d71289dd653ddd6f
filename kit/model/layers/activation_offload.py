"""Activation offload: the inputs of checkpointed layers are kept in pinned host memory until their backward pass.

Promises: losses and gradients are every bit those without it. The host never waits for a copy: each is made between
what the device computes, on its own stream.
"""

from typing import Any

import torch


def install_activation_offload(model: torch.nn.Module) -> None:
    """Let the checkpointed layers of ``model`` keep their inputs in host memory. Call it after checkpointing is on."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):  # as transformers marks them
            offload = _Offload()
            module.register_forward_pre_hook(offload.begin)
            module.register_forward_hook(offload.end, always_call=True)


class _Offload:
    """Offloads one layer's input to pinned host memory; tensors shared by all layers, such as masks, are not moved."""

    def __init__(self) -> None:
        self._hooks: Any = None
        self._storage = 0  # of the input of the layer

    def begin(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward pass of the layer, whose first argument is its input."""
        if layer.training and torch.is_grad_enabled() and args and isinstance(args[0], torch.Tensor):
            self._storage = _address(args[0])
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._out, _back)
            self._hooks.__enter__()

    def end(self, *_: Any) -> None:
        """After it, also where it failed."""
        if self._hooks:
            self._hooks.__exit__()
            self._hooks = None

    def _out(self, tensor: torch.Tensor) -> Any:
        if _address(tensor) != self._storage:
            return tensor
        return tensor.device, empty_on_host(tensor).copy_(tensor, non_blocking=True)


def _back(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    device, values = kept
    return torch.empty_like(values, device=device).copy_(values, non_blocking=True)


def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for a copy of ``tensor``; of one on a GPU it is pinned."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
