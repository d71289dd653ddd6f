"""Compile the decoder layers of a model in place, and the loss of its head, with torch.compile: ``torch_compile``.

Promises:

- Modules, parameters and their names stay as they are: adapters, sharding, checkpoints and exports see no difference.
- All layers share their graphs, and a graph serves all lengths of rows. Nothing of a layer's forward is left out of it.
- A class of layers whose forward cannot be one graph runs uncompiled, and a line says which and why. So does, where
  ``auto`` compiles, whatever the compiler fails on, from the same call on: a rank on which it fails alone makes the
  collectives of the others.
- Calls in ``uncompiled`` run the plain layers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kit.model.experts.packed import is_experts
from kit.model.layers.attention import LazyMask
from kit.model.layers.packs import layers_along_rows
from kit.system.console import say
from kit.system.errors import UserError, first_line

BACKEND = "inductor"
# Graphs of one run that are expected at most: of training, evaluation and the reference, each for one row and for more,
# for the first layer and the others, for each kind of layer. Whatever needs a further one runs uncompiled.
MAX_GRAPHS = 32

_switched_off = False


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the ``with`` block, run the plain layers: for passes of other shapes than training has, as in generation."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def why_not_compiled(model: torch.nn.Module, class_names: Collection[str], packing: bool, by_default: bool) -> str:
    """Return why the decoder layers of ``model``, which may be on meta, are not compiled; empty if they are.

    Args:
        class_names: of the decoder layers.
        packing: whether batches are packed.
        by_default: for ``auto``, which leaves out also what would be compiled for each length, or not in one graph.
    """
    if (packing or by_default) and (layers := layers_along_rows(model)):
        return f"{type(layers[0]).__name__} has other shapes in each step"
    if by_default and any(map(is_experts, model.modules())):
        return "layers with experts are not one graph"
    return "" if class_names else f"{type(model).__name__} does not name its decoder layers"


class Compiler:
    """What is compiled of a model. A call that needs another graph compiles it.

    Attributes:
        is_on: whether calls are compiled; at first they are not, so that checks before the first step need no graphs.
        left_out: what runs uncompiled, and why.
        what: the number of layers, and their classes.
    """

    def __init__(self, falls_back: bool = False) -> None:
        """``falls_back``: whether a failure of the compiler is a warning; else it is a ``UserError``."""
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        # A graph of one layer is smaller than DDP's buckets: it need not be cut where they end.
        torch._dynamo.config.optimize_ddp = False
        # Without this, kernels are chosen by their time, and a rerun may choose others.
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
        # Norms and activations that a product of the backward pass reads are computed again, not kept: of a gated MLP
        # with adapters a third of what it would keep.
        torch._functorch.config.ban_recompute_materialized_backward = False
        # The backward pass is compiled in the call of the forward pass, which can still run uncompiled.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self._falls_back = falls_back
        self.left_out: dict[str, str] = {}
        self.is_on = False
        self.what = ""

    def compile_layers(self, model: torch.nn.Module, class_names: Collection[str]) -> None:
        """Replace the ``forward`` of each layer by one that calls its graph.

        Args:
            model: with its adapters, and not yet wrapped or sharded: hooks of sharding stay outside of the graphs.
            class_names: of the layers.
        """
        layers = [module for module in model.modules() if type(module).__name__ in class_names]
        graph = compiled(_forward)
        self.what = f"{len(layers)} x {'/'.join(sorted({type(layer).__name__ for layer in layers}))}"
        for layer in layers:
            layer.forward = partial(self._call, type(layer).__name__, graph, _forward, layer)

    def compile(self, function: Any) -> Any:
        """Return ``function`` as one that calls its graph."""
        return partial(self._call, function.__name__, compiled(function), function)

    def leave_out(self, name: str, why: str) -> None:
        """Let ``name`` run uncompiled from now on, with a line that says so."""
        if name not in self.left_out:
            self.left_out[name] = why
            say(f"warning: torch_compile: {name} runs uncompiled because {why}")

    def _call(self, name: str, graph: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of ``plain``, which is the forward of layers or a function of this ``name``."""
        if not self.is_on or _switched_off or name in self.left_out:
            return plain(*args, **kwargs)
        from torch._dynamo import exc

        mask = kwargs.get("attention_mask")
        if isinstance(mask, LazyMask) and kwargs.get("cu_seq_lens_q") is None:
            kwargs["attention_mask"] = mask.dense  # it is built once for all layers, and not in a graph
        try:
            return graph(*args, **kwargs)
        # What these say is known before anything of the call has run.
        except exc.FailOnRecompileLimitHit:  # graphs that exist still run: checkpointing may recompute their layers
            self.leave_out(f"{name} with more than {MAX_GRAPHS} graphs", "each further one takes minutes")
        except (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError) as error:
            self.leave_out(name, f"of a graph break: {first_line(error)}")
        except exc.TorchDynamoException as error:
            found = f"the compiler failed ({first_line(getattr(error, 'inner_exception', error))})"
            if not self._falls_back:
                raise UserError("torch_compile", found, fix="--torch_compile false") from error
            self.leave_out(name, found)
        return plain(*args, **kwargs)


def compiled(function: Any) -> Any:
    """Return ``function`` as one graph, which serves all lengths: a resumed run begins with another batch."""
    return torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True)


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The plain forward of ``layer``: that of its class, which sharding may have replaced by a subclass."""
    return type(layer).forward(layer, *args, **kwargs)
