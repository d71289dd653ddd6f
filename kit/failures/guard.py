"""What a run that fails says of itself: ranks that died or hang, and memory that ran out, explained."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kit.console import progress
from kit.failures import advice, exits
from kit.failures.phases import Phase
from kit.failures.ranks import Watch
from kit.strategy.rendezvous import open_store

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from kit.config.recipe import Recipe
    from kit.strategy.topology import Topology


class Guard:
    """Explains what fails from here on, until the process ends. Every rank makes one, after the group exists."""

    def __init__(self, accelerator: "Accelerator", recipe: "Recipe", topology: "Topology", trains: bool = True) -> None:
        """
        Args:
            trains: the same command goes on from a checkpoint.
        """
        self.watch = Watch(accelerator, open_store(), recipe.ddp_timeout, trains)
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        exits.explain_with(self.watch.explain)
        exits.explain_with(
            lambda error: advice.explain(error, self._model, self._optimizer, recipe, topology, trains),
        )

    def at(self, phase: Phase, step: int = 0) -> None:
        """This rank begins ``phase``, of 1-based ``step`` where it is part of one."""
        self.watch.at(phase, step)

    def progress(self, items: Iterable[Any], name: str, total: int) -> Iterator[Any]:
        """``items`` with a progress bar; each item taken shows that this rank does not hang."""
        return self.watch.along(progress)(items, name, total)

    def holds(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> None:
        """What memory is full of, if it runs out."""
        self._model, self._optimizer = model, optimizer
