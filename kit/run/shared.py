"""Check that all machines of a run write to one folder.

Promises: a folder on the disk of a single machine is refused before weights are read, not at the first save.
"""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kit.strategy.processes.launcher import leads_other_machine
from kit.strategy.processes.rendezvous import from_main, together
from kit.system import durable, lock
from kit.system.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

_DELAY_SECONDS = 5.0  # until a network disk shows on one machine what another one wrote
_FIX = "give an --output_dir on a disk that all machines share (NFS): every machine writes its shards of a checkpoint"


def check_shared(accelerator: "Accelerator", folder: Path) -> None:
    """Check that ``folder``, which rank 0 has locked, is the same on every machine. Called by all ranks.

    Raises:
        UserError: on all ranks, if a machine has another folder at this path, or cannot write to it.
    """
    signature = from_main(lambda: lock.read(folder))
    with together(accelerator):
        if leads_other_machine():
            _check_same_folder(signature, folder, folder / f".probe-{accelerator.process_index}")


def _check_same_folder(signature: dict[str, object], folder: Path, probe: Path) -> None:
    """Raise ``UserError`` unless the lock of ``folder`` has ``signature``, and ``probe`` can be written."""
    is_new = not folder.exists()
    found = f"{folder} on {socket.gethostname()} is not that of rank 0"
    try:
        # A network disk may answer from its memory that a file is not there, until something is made beside it.
        folder.mkdir(parents=True, exist_ok=True)
        durable.create(probe).close()
        probe.unlink()
        end = time.monotonic() + _DELAY_SECONDS
        while lock.read(folder) != signature:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        else:
            return
        if is_new:
            with suppress(OSError):
                folder.rmdir()
    except OSError as error:
        found = f"{folder} on {socket.gethostname()}: {error.strerror or error}"
    raise UserError("output_dir", found, "one folder that all machines can write to", _FIX)
