"""The inputs of decoder layers wait for their backward pass in pinned host memory, for ``activation_offload``.

Promises: losses and gradients are every bit those without it. Of the inputs that checkpointed layers keep, the device
holds two at a time. The host never waits for a copy: a stream of its own copies each input out while its layer
computes, and back while the layer after it is computed backward. The last one is used where it is.

What the stream copies is held until the computing stream has waited for the copy, so that no memory is given to another
tensor while it is read or written.
"""

import weakref
from typing import Any

import torch


class _Input:
    """The input of one layer. It lives as long as autograd keeps it."""

    def __init__(self, values: torch.Tensor, before: "_Input | None") -> None:
        self.values: torch.Tensor | None = values  # while it is on the device
        self.device = values.device
        self.host = empty_on_host(values)
        self.before = weakref.ref(before) if before else None  # the input of the layer before it
        self.copied: Any = None  # an event: the last copy is done


class _Offload:
    """Copies the inputs of a model's layers out and back. One of them is on its way at a time."""

    def __init__(self) -> None:
        self._runtime: Any = None  # torch.cuda
        self._copies: Any = None  # a stream
        self._moving: _Input | None = None
        self._last: weakref.ref[_Input] | None = None  # the input that came last
        self._hooks: Any = None
        self._storage = 0  # of the input of the layer that computes

    def begin_layer(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward pass of a layer, whose first argument is its input."""
        if layer.training and torch.is_grad_enabled() and args and isinstance(args[0], torch.Tensor):
            if not self._runtime:
                self._runtime = torch.get_device_module(args[0].device)
                self._copies = self._runtime.Stream()
            self._storage = _address(args[0])
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._out, self._back)
            self._hooks.__enter__()

    def end_layer(self, *_: Any) -> None:
        """After it, also where it failed."""
        if self._hooks:
            self._hooks.__exit__()
            self._hooks = None

    def _out(self, tensor: torch.Tensor) -> Any:
        if _address(tensor) != self._storage:  # masks, say, which all layers share
            return tensor
        self._settle()
        moving = _Input(tensor, self._last() if self._last else None)
        self._copy(moving, moving.host, tensor)
        self._last = weakref.ref(moving)
        return moving

    def _back(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Input):
            return kept
        if kept is not self._moving:
            self._fetch(kept)
        values = kept.values
        assert values is not None
        self._settle()
        before = kept.before() if kept.before else None
        if before:
            self._fetch(before)
        return values

    def _fetch(self, kept: _Input) -> None:
        self._settle()
        # Of the computing stream's memory, which that may still use for what it computes until now.
        kept.values = torch.empty_like(kept.host, device=kept.device)
        self._copy(kept, kept.values, kept.host)

    def _copy(self, moving: _Input, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._copies):
            target.copy_(source, non_blocking=True)
            moving.copied = self._runtime.Event()
            moving.copied.record(self._copies)
        self._moving = moving

    def _settle(self) -> None:
        """Let the computing stream wait for the copy that is under way, and release what it holds on the device."""
        if self._moving:
            self._runtime.current_stream().wait_event(self._moving.copied)
            self._moving.values = None
            self._moving = None


def install_activation_offload(model: torch.nn.Module) -> None:
    """Let the layers of ``model`` that checkpoint keep their inputs in host memory. Call it when they checkpoint."""
    offload = _Offload()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):  # as transformers marks them
            module.register_forward_pre_hook(offload.begin_layer)
            module.register_forward_hook(offload.end_layer, always_call=True)


def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for a copy of ``tensor``; of one on a GPU it is pinned."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
