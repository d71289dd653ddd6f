"""Rendezvous of the ranks: the key-value store, the process group, and checks that all ranks agree."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kit.errors import Problem, Problems, TrainingError, UserError, raise_if

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

# A collective may take so many times ``ddp_timeout``. It is generous, because ranks may wait for a slow disk, and
# ``kit.failures.ranks`` detects a hang earlier.
PATIENCE = 10


def join_group(backend: str | None, timeout_seconds: float) -> None:
    """Join the process group of all ranks that the launcher started.

    Args:
        backend: of torch.distributed; None: torch chooses.
        timeout_seconds: how long to wait for all ranks. The time-out of the group's collectives is ``PATIENCE`` times
            as long.

    Raises:
        TrainingError: not all ranks arrived within ``timeout_seconds``.
        UserError: the port of the rendezvous is in use.
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
    """Open a new connection to the ranks' key-value store; None for a single process. Called by all ranks."""
    from accelerate.utils import gather_object
    from torch.distributed import PrefixStore, is_initialized

    if not is_initialized():
        return None
    return PrefixStore(gather_object([uuid.uuid4().hex])[0], _connect(3))


@contextmanager
def together(accelerator: "Accelerator") -> Iterator[None]:
    """If the ``with`` block raises ``UserError`` on any rank, raise the problems of all ranks on all ranks.

    Called by all ranks.
    """
    from accelerate.utils import gather_object

    problems = Problems()
    with problems.caught():
        yield
    raise_if(gather_object(list(problems)))


def agree(accelerator: "Accelerator", **values: Any) -> None:
    """Check that all ranks pass the same values. Called by all ranks.

    Args:
        values: small comparable values. The name of an argument, such as ``dataset``, is the field that the problem
            names.

    Raises:
        UserError: on all ranks, if a value on any rank differs from that on rank 0.
    """
    from accelerate.utils import gather_object

    problems = []
    all_values = gather_object([values])
    for where in values:
        others = [str(rank) for rank, own in enumerate(all_values) if own[where] != all_values[0][where]]
        if others:
            found = f"rank {', '.join(others)} found something else than rank 0"
            problems.append(Problem(where, found, "the same on every machine"))
    raise_if(problems)


def from_main(make: Callable[[], T]) -> T:
    """Return on all ranks what ``make`` returns on the main process, where alone it is called. Called by all ranks.

    The value is small and can be pickled.
    """
    import torch

    if not torch.distributed.is_initialized():
        return make()
    values = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]


def _connect(timeout_seconds: float, is_master: bool = False) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def _meet(rank: int, world: int, timeout_seconds: float) -> Any:
    """Return a section of the ranks' key-value store that only the ranks of this start use.

    The launcher may keep the store while it restarts the ranks, and restarted ranks must not read the keys of the ranks
    before them. So the section needs a new name at each start. The launchers' counts of restarts are no such name,
    because each machine counts for itself. Instead, every rank creates a random name. Rank 0 sends its name to each
    other rank under the name of that rank, and waits until all of them have confirmed it.

    Raises:
        torch.distributed.DistError: not all ranks arrived within ``timeout_seconds``.
    """
    from torch.distributed import DistStoreError, PrefixStore

    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store, mine = _connect(timeout_seconds, is_master), uuid.uuid4().hex
    if rank:
        store.set(f"from/{rank}", mine)
        try:
            name = store.get(f"to/{mine}").decode()
        except DistStoreError:
            raise DistStoreError("rank 0 did not come") from None
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/all"])
        return PrefixStore(name, store)
    absent, end = set(range(1, world)), time.monotonic() + timeout_seconds
    while absent:
        if time.monotonic() > end:
            raise DistStoreError(f"rank {', '.join(map(str, sorted(absent)))} did not come")
        for other in absent:
            if store.check([f"from/{other}"]):  # perhaps of a rank of an earlier start; the new one will overwrite it
                store.set(f"to/{store.get(f'from/{other}').decode()}", mine)
        absent = {other for other in absent if not store.check([f"{mine}/{other}"])}
        time.sleep(0.01)
    store.set(f"{mine}/all", "here")
    return PrefixStore(mine, store)
