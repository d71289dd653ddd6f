"""Compile the decoder layers of a model in place with torch.compile, for ``torch_compile``.

Promises:

- Modules, parameters and their names stay as they are: adapters, sharding, checkpoints and exports see no difference.
- All layers share their graphs, and a graph serves all lengths of rows. Nothing of a layer's forward is left out of it.
- A class of layers whose forward cannot be one graph runs uncompiled, and a line says which and why.
- Calls in ``uncompiled`` run the plain layers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kit.model.layers.attention import LazyMask
from kit.model.layers.packs import layers_along_rows
from kit.system.console import say
from kit.system.errors import Problem, UserError, first_line

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


def check_compile(model: torch.nn.Module, class_names: Collection[str], packing: bool) -> list[Problem]:
    """Return a problem if the decoder layers of ``model``, which may be on meta, cannot be compiled.

    Args:
        class_names: of the decoder layers.
        packing: whether batches are packed.
    """
    if class_names and packing and (layers := layers_along_rows(model)):
        found = f"{type(layers[0]).__name__} with packing: its samples are batches of other shapes in each step"
        return [Problem("torch_compile", found, fix="--torch_compile false; or --packing false")]
    if class_names:
        return []
    found = f"{type(model).__name__} does not name its decoder layers"
    return [Problem("torch_compile", found, fix="--torch_compile false")]


def compiled(function: Any) -> Any:
    """Return ``function`` as one graph, which serves all lengths: a resumed run begins with another batch."""
    return torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True)


class CompiledLayers:
    """The compiled layers of a model. A call that needs another graph compiles it.

    Attributes:
        is_on: whether they are compiled; at first they are not, so that checks before the first step need no graphs.
    """

    def __init__(self, model: torch.nn.Module, class_names: Collection[str]) -> None:
        """Replace the ``forward`` of each layer by one that calls its graph.

        Args:
            model: with its adapters, and not yet wrapped or sharded: hooks of sharding stay outside of the graphs.
            class_names: of the layers.
        """
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        layers = [module for module in model.modules() if type(module).__name__ in class_names]
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        # A graph of one layer is smaller than DDP's buckets: it need not be cut where they end.
        torch._dynamo.config.optimize_ddp = False
        # Without this, kernels are chosen by their time, and a rerun may choose others.
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
        # Norms and activations that a product of the backward pass reads are computed again, not kept: of a gated MLP
        # with adapters a third of what it would keep.
        torch._functorch.config.ban_recompute_materialized_backward = False
        self._compiled: Any = compiled(_forward)
        self._uncompiled: set[str] = set()  # classes whose forward is not one graph
        self._is_full = False
        self.is_on = False
        self.num_layers = len(layers)
        self.names = sorted({type(layer).__name__ for layer in layers})
        for layer in layers:
            layer.forward = partial(self._call, type(layer).__name__, layer)

    @property
    def num_graphs(self) -> int:
        """The number of graphs so far; each has a forward pass, and in training a backward pass."""
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def closing_notes(self) -> list[str]:
        """Return a line with the number of graphs that the whole run made."""
        return [f"torch_compile: {self.num_layers} x {'/'.join(self.names)}, graphs in all: {self.num_graphs}"]

    def _call(self, name: str, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of ``layer``, whose class has that ``name``."""
        if not self.is_on or _switched_off or name in self._uncompiled:
            return _forward(layer, *args, **kwargs)
        from torch._dynamo import exc

        mask = kwargs.get("attention_mask")
        if isinstance(mask, LazyMask) and kwargs.get("cu_seq_lens_q") is None:
            kwargs["attention_mask"] = mask.dense  # it is built once for all layers, and not in a graph
        try:
            return self._compiled(layer, *args, **kwargs)
        # What these say is known before anything of the layer has run.
        except exc.FailOnRecompileLimitHit:
            if not self._is_full:
                self._is_full = True
                say(f"warning: torch_compile: more than {MAX_GRAPHS} graphs; calls that need another run uncompiled")
        except (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError) as error:
            self._uncompiled.add(name)
            say(f"warning: torch_compile: {name} runs uncompiled because of a graph break: {first_line(error)}")
        except exc.TorchDynamoException as error:
            found = f"the compiler failed ({first_line(getattr(error, 'inner_exception', error))})"
            raise UserError("torch_compile", found, fix="--torch_compile false") from error
        return _forward(layer, *args, **kwargs)


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The plain forward of ``layer``: that of its class, which sharding may have replaced by a subclass."""
    return type(layer).forward(layer, *args, **kwargs)
