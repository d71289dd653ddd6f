"""Explanations for a run that fails because a rank died or hangs, or because memory ran out."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kit.console import progress
from kit.failures import exits
from kit.failures.ranks import Watch
from kit.phases import Phase
from kit.strategy.rendezvous import open_store

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class Guard:
    """Explains the failures of a run: ranks that died or hang, and out of memory.

    Every rank creates one, after the process group exists. It works until the process ends.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        timeout_seconds: float,
        explain_memory: Callable[[BaseException, Any, Any], Exception | None],
        trains: bool = True,
    ) -> None:
        """
        Args:
            timeout_seconds: as ``ddp_timeout``.
            explain_memory: ``kit.memory.shortage.explain``, which is given the error, the model and the optimiser.
            trains: the same command goes on from a checkpoint.
        """
        self.watch = Watch(accelerator, open_store(), timeout_seconds, trains)
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        exits.explain_with(self.watch.explain)
        exits.explain_with(lambda error: explain_memory(error, self._model, self._optimizer))

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Note that this rank begins ``phase``; ``step`` counts from 1, and is 0 for a phase outside the steps."""
        self.watch.enter(phase, step)

    def progress(self, items: Iterable[Any], name: str, total: int) -> Iterator[Any]:
        """Return ``items`` with a progress bar. Each item taken counts as a sign that this rank does not hang."""
        return self.watch.noting_progress(progress)(items, name, total)

    def set_model(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> None:
        """Set the model and optimiser whose memory is measured if memory runs out."""
        self._model, self._optimizer = model, optimizer
