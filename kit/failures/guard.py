"""Explain failures of a run: a rank exited or hangs, or out of memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kit.failures import exits
from kit.failures.watch import Watch
from kit.strategy.processes.rendezvous import open_store

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class Guard(Watch):
    """Explains the failures of a run: ranks that exited or hang, and out of memory.

    Every rank creates one, after the process group exists. It works until the process ends.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        timeout_seconds: float,
        explain_memory: Callable[[BaseException, Any, Any, Any], Exception | None],
        trains: bool = True,
    ) -> None:
        """
        Args:
            timeout_seconds: as ``ddp_timeout``.
            explain_memory: ``kit.memory.out_of_memory.explain``, which gets the error, model, optimiser and phase.
            trains: the same command resumes from a checkpoint.
        """
        super().__init__(accelerator, open_store(), timeout_seconds, trains)
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        exits.explain_with(self.explain)
        exits.explain_with(lambda error: explain_memory(error, self._model, self._optimizer, self.phase))

    def set_model(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> None:
        """Set the model and optimiser whose memory is measured if memory runs out."""
        self._model, self._optimizer = model, optimizer
