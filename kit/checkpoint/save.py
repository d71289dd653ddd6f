"""Asynchronous checkpoints. A checkpoint is complete or absent, even if a process is killed.

A save has these steps:

1. Every rank copies its state to CPU memory, into buffers that it keeps for the next save. Only this pauses the
   training loop.
2. In the background, every rank writes its file to a staging folder, syncs it, and sends its hash to rank 0.
3. Rank 0 writes the manifest, renames the staging folder, and syncs the folder.
4. Rank 0 deletes older checkpoints.

Only one save runs at a time; the next one waits for it.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from kit.checkpoint.load import alone, collect
from kit.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    delete,
    describe_file,
    digest_of,
    list_checkpoints,
    name_of,
)
from kit.checkpoint.tensor_files import TensorWriter
from kit.strategy.processes.rendezvous import collective_timeout
from kit.strategy.weights import is_sharded, own_part
from kit.system import durable
from kit.system.console import say
from kit.system.errors import UserError, out_of_memory

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.config.settings.output import OutputSettings

# Between saves by time: each takes a few seconds, less than 1 % of it.
SAVE_SECONDS = 30 * 60.0
# Smaller buffers may lie in one page with others, and a page can be pinned only once.
MIN_PINNED_BYTES = 2**20
# Of replicated tensors. Every rank opens all files that have one, and AdamW has one of 4 bytes (its step) for each
# parameter: spread over all files, the number of opens would grow as the square of the ranks.
MIN_SHARE_BYTES = 2**20


class Saver:
    """Writes the checkpoints of a run. Every rank creates one and makes the same calls."""

    def __init__(
        self,
        accelerator: "Accelerator",
        settings: "OutputSettings",
        folder: Path,
        about: dict[str, Any],
        synced_first: Path | None = None,
        on_work: Callable[[str], None] = lambda work: None,
        *,
        timeout_seconds: int,
    ) -> None:
        """
        Args:
            folder: the folder ``checkpoints`` of the run.
            about: entries of the manifest about the run (``RunFolder.about``).
            synced_first: a file that is synced before each checkpoint appears, so that after a power loss it is not
                older than the checkpoint.
            on_work: called with the work that this rank starts for a save; with an empty string when it is done.
            timeout_seconds: as ``ddp_timeout``. The collectives of a save have that of ``collective_timeout``,
                because the thread that watches the ranks ends the process first.
        """
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._in_background = settings.async_save
        self._by_time, self._saved_at = settings.saves_by_time, time.monotonic()
        self._limit = settings.save_total_limit
        self._keep_best = settings.keep_best
        self._folder = folder
        self._about = about
        self._synced_first = synced_first
        self._on_work = on_work
        # Saves have a process group of their own, because their collectives run concurrently with those of training.
        timeout = collective_timeout(timeout_seconds)
        self._group = None if alone() else torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        self._buffers: dict[str, torch.Tensor] = {}  # in CPU memory, kept from the first save on
        self._step = 0

    def save(self, model: torch.nn.Module, optimizer: Any, state: dict[str, Any], weights_only: bool = False) -> None:
        """Start to write the checkpoint ``step-NNNNNNNN``. Waits for the save before it. Called by all ranks.

        Args:
            state: JSON values that ``read_state`` returns. It has ``step``, the number of steps done, and with
                ``keep_best`` also ``best``; the checkpoint of the step in ``best`` is never deleted.
            weights_only: leave out the optimiser's state. No run can resume from the checkpoint.

        Raises:
            UserError: the save before this one failed; or this one, if saves are not in the background.
        """
        self.wait()
        self._saved_at = time.monotonic()
        self._step = state["step"]
        target = self._folder / name_of(self._step)
        tensors, scalars = collect(model, None if weights_only else optimizer)
        tensors = _share_of(tensors, self._rank, self._world)
        copies = self._copy(tensors) if self._in_background else None
        state = {**state, "optimizer_scalars": scalars}
        about = {**self._about, "weights_only": weights_only}
        writer = TensorWriter(
            durable.staging_of(target), copies, lambda files: self._publish(files, target, state, about)
        )
        self._saving = self._thread.submit(self._write, tensors, writer, target)
        if not self._in_background:
            self.wait()

    @torch.no_grad()
    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this rank's part of each tensor to CPU memory. Returns when all is copied.

        torch has stagers too. They allocate anew at each save, or cannot copy the shards of FSDP1, or round pinned
        memory up to a power of two.
        """
        for name, tensor in tensors.items():
            part = own_part(tensor)
            if name not in self._buffers:
                buffer = torch.empty(part.shape, dtype=part.dtype)
                if part.is_cuda and buffer.nbytes >= MIN_PINNED_BYTES:
                    _pin(buffer, part.device)
                self._buffers[name] = buffer
            self._buffers[name].copy_(part, non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return self._buffers

    def is_due(self) -> bool:
        """Whether a save by time is due on this rank. The ranks must agree, since their clocks differ."""
        return self._by_time and time.monotonic() - self._saved_at >= SAVE_SECONDS

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed, so that ``wait`` would raise at once."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def wait(self) -> None:
        """Wait until the last save is complete on all ranks.

        Raises:
            UserError: on all ranks, if the disk made the save fail on any rank.
            RuntimeError: on all ranks, if the save failed on any rank for another reason.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except CheckpointException as error:  # an error of any rank while it wrote
            rank, (cause, *_) = next(iter(error.failures.items()))
            if not isinstance(cause, OSError) or out_of_memory(cause):
                raise RuntimeError(f"checkpoint of step {self._step}, rank {rank}: {cause}") from cause
            complete = list_checkpoints(self._folder)
            last = f"the last complete one is {complete[-1].name}" if complete else "there is none yet"
            why = f"rank {rank}: {cause.strerror or cause}"
            found = f"the checkpoint of step {self._step} could not be written ({why}); {last}"
            fix = f"free disk space, or fix the disk of {self._folder}; then the same command resumes"
            raise UserError("output_dir", found, fix=fix) from None

    def finish(self, seconds: float = 20.0) -> None:
        """Wait up to ``seconds`` for a save in the background. For a run that ends with an error; never raises."""
        if self._saving is not None:
            wait([self._saving], seconds)

    def _write(self, tensors: dict[str, torch.Tensor], writer: TensorWriter, target: Path) -> None:
        """Write the checkpoint, and delete older ones. Runs in a thread of its own; if a rank fails, all of them do."""
        device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)
        if device is not None:  # a new thread would start on GPU 0 and take memory there, on any rank
            torch.accelerator.set_device_index(device)
        self._on_work(f"writing the checkpoint of step {self._step}")
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone())
        except BaseException:
            # No rank writes any more, as all of them report to the others how they ended. Only rank 0 deletes: it
            # alone knows whether the folder got its name.
            if self._rank == 0:
                with suppress(OSError):
                    durable.remove(durable.staging_of(target))
            raise
        finally:
            self._on_work("")

    def _publish(self, files: dict[str, Any], target: Path, state: dict[str, Any], about: dict[str, Any]) -> None:
        """Write the manifest of a checkpoint, and give its folder its name. Called on rank 0 alone."""
        staging = durable.staging_of(target)
        durable.write_text(staging / STATE, json.dumps(state, indent=1) + "\n")
        if not all((staging / name).is_file() for name in files):
            raise OSError("each rank sees only its own files: output_dir must be on a disk that all machines share")
        files = {**files, STATE: describe_file(staging / STATE)}
        manifest = {"format": FORMAT, "step": state["step"], **about, "files": files}
        manifest["xxh3_128"] = digest_of(manifest)
        if self._synced_first is not None:
            durable.sync(self._synced_first)
        durable.write_text(staging / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        os.replace(staging, target)
        for folder in (self._folder, self._folder.parent):
            durable.sync(folder)
        self._prune(state)

    def _prune(self, state: dict[str, Any]) -> None:
        """Delete older checkpoints. If that fails, the run continues with a warning."""
        best_step = state["best"].get("step") if self._keep_best else None
        kept = "" if best_step is None else name_of(best_step)
        names = [path.name for path in list_checkpoints(self._folder)]
        outdated = names[: -self._limit] if self._limit else []
        for old in (name for name in outdated if name != kept):
            try:
                delete(self._folder / old)
            except OSError as error:
                say(f"warning: {self._folder / old} cannot be deleted ({error.strerror})")


def _pin(buffer: torch.Tensor, device: torch.device) -> None:
    """Pin memory in place, without rounding it up as torch would. If CUDA refuses, copies are only slower."""
    if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) != 0:
        with suppress(RuntimeError):
            torch.zeros((), device=device)  # takes the error, which CUDA would report at the next kernel


def _share_of(tensors: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """The sharded tensors, and this rank's part of the replicated ones: each is written once.

    torch would choose the writer of a replicated tensor only after all ranks have copied it.
    """
    share, loads, writer, left = {}, [0] * world, 0, MIN_SHARE_BYTES  # bytes
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if left <= 0:
                writer, left = loads.index(min(loads)), MIN_SHARE_BYTES
            size = tensor.numel() * tensor.element_size()
            loads[writer] += size
            left -= size
            if writer != rank:
                continue
        share[name] = tensor
    return share
