"""How the ranks of a run meet and agree: one key-value store, one process group, one answer to each question."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kit.errors import Problem, Problems, TrainingError, UserError, raise_if

if TYPE_CHECKING:
    from accelerate import Accelerator


PATIENCE = (
    10  # times ddp_timeout that a collective may take: a slow disk is no hang, and `kit.failures.ranks` finds who hangs
)


def join_group(backend: str | None, timeout_seconds: float) -> None:
    """Join the process group of all ranks that the launcher started. Its collectives wait ``PATIENCE`` times as long.

    Raises:
        TrainingError: not all of them came within ``timeout_seconds``.
        UserError: the port at which they meet is taken.
    """
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _meet(rank, world, timeout_seconds)
        timeout = timedelta(seconds=PATIENCE * timeout_seconds)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except torch.distributed.DistError as error:
        if "EADDRINUSE" in str(error):
            where, found = "MASTER_PORT", f"{os.environ['MASTER_PORT']} is in use on this machine"
            raise UserError(Problem(where, found, "a free port", "the launcher's --master_port sets it")) from None
        found = f"not all {world} processes came within {timeout_seconds} s (--ddp_timeout)"
        raise TrainingError(f"{found}: {str(error).splitlines()[0]}") from None


def open_store() -> Any:
    """A connection of its own to the key-value store at which the ranks met; None for a single process."""
    from accelerate.utils import gather_object
    from torch.distributed import PrefixStore, is_initialized

    if not is_initialized():
        return None
    return PrefixStore(gather_object([uuid.uuid4().hex])[0], _connect(3))


@contextmanager
def together(accelerator: "Accelerator") -> Iterator[None]:
    """What only some ranks can find wrong inside stops all of them, with the same problems."""
    from accelerate.utils import gather_object

    found = Problems()
    with found.caught():
        yield
    raise_if(gather_object(list(found)))


def agree(accelerator: "Accelerator", **values: Any) -> None:
    """Compare what each rank found. Raises ``UserError`` on all ranks where one found something else than rank 0.

    Args:
        values: by the field that the problem names, such as ``dataset``; must be comparable and small.
    """
    from accelerate.utils import gather_object

    problems = []
    all_values = gather_object([values])
    for where in values:
        others = [str(rank) for rank, found in enumerate(all_values) if found[where] != all_values[0][where]]
        if others:
            found = f"rank {', '.join(others)} found something else than rank 0"
            problems.append(Problem(where, found, "the same on every machine"))
    raise_if(problems)


def _connect(timeout_seconds: float, is_master: bool = False) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def _meet(rank: int, world: int, timeout_seconds: float) -> Any:
    """A part of the ranks' key-value store in which only the ranks of this start write.

    The store may be the launcher's and outlive ranks that are started anew, which must not find the dead ones'
    addresses; and several launchers count restarts each for itself, so their counts are no name to meet under. Rank 0
    invents one, answers with it to every name that the others invent, and waits until all of them know it.

    Raises:
        torch.distributed.DistError: not all ranks came within ``timeout_seconds``.
    """
    from torch.distributed import DistStoreError, PrefixStore

    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store, mine = _connect(timeout_seconds, is_master), uuid.uuid4().hex
    if rank:
        store.set(f"from/{rank}", mine)
        name = store.get(f"to/{mine}").decode()  # waits
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/all"])
        return PrefixStore(name, store)
    absent, end = set(range(1, world)), time.monotonic() + timeout_seconds
    while absent:
        if time.monotonic() > end:
            raise DistStoreError(f"rank {', '.join(map(str, sorted(absent)))} did not come")
        for other in absent:
            if store.check([f"from/{other}"]):  # of a dead one, maybe; then another will follow
                store.set(f"to/{store.get(f'from/{other}').decode()}", mine)
        absent = {other for other in absent if not store.check([f"{mine}/{other}"])}
        time.sleep(0.01)
    store.set(f"{mine}/all", "here")
    return PrefixStore(mine, store)
