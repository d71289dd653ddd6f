"""Rendezvous of the ranks: the key-value store, what they agree on, and the process group.

Promises: no call of the store waits longer than a time-out of ours, whatever the network does.
"""

import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kit.console import say, show_error
from kit.errors import Problem, Problems, TrainingError, UserError, raise_if
from kit.strategy.agreement import Fact, exchange
from kit.strategy.launcher import end_launcher_later, launched_rank, record_exit
from kit.strategy.network import check_main_address, check_own_name, is_own, use_loopback

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

# The time-out of a collective, in units of ``ddp_timeout``. It is generous, because ranks may wait for a slow disk, and
# ``kit.failures.ranks`` detects a hang earlier.
COLLECTIVE_TIMEOUTS = 10
STORE_SECONDS = 3.0  # how long a call of the key-value store may take
_QUIET_SECONDS = 3.0  # for which rank 0 waits for others before it says so


def join_group(backend: str | None, timeout_seconds: float, facts: Sequence[Fact] = ()) -> None:
    """Meet all ranks that the launcher started, agree with them on ``facts``, and join their process group.

    Args:
        backend: of torch.distributed; None: torch chooses.
        timeout_seconds: how long to wait for all ranks. The time-out of the group's collectives is
            ``COLLECTIVE_TIMEOUTS`` times as long.
        facts: must be the same on all ranks.

    Raises:
        TrainingError: not all ranks arrived within ``timeout_seconds``.
        UserError: ranks differ in ``facts``, a machine has a name that others cannot use, or the port of the
            rendezvous is in use.
    """
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    launched = launched_rank()
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # set by torchrun, which started this machine only
        use_loopback()
    if launched and launched.several_machines and not is_own(os.environ["MASTER_ADDR"]):
        raise_if(check_main_address(os.environ["MASTER_ADDR"], "MASTER_ADDR"))

    def meet() -> tuple[Any, list[Problem], list[str]]:
        store = _meet(rank, world, timeout_seconds)
        return store, *exchange(store, rank, world, facts, check_own_name())

    try:
        store, problems, warnings = call_within(timeout_seconds + STORE_SECONDS, meet)
        raise_if(problems)
        say(*warnings)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUTS * timeout_seconds)
        with _ending_after(timeout_seconds):
            torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except torch.distributed.DistError as error:
        if "EADDRINUSE" in str(error):
            where, found = "MASTER_PORT", f"{os.environ['MASTER_PORT']} is in use on this machine"
            raise UserError(Problem(where, found, "a free port", "the launcher's --master_port sets it")) from None
        found = f"not all {world} processes came within {timeout_seconds} s (--ddp_timeout)"
        raise TrainingError(f"{found}: {str(error).splitlines()[0]}") from None
    except TimeoutError:
        found = f"not all {world} processes came within {timeout_seconds} s (--ddp_timeout)"
        raise TrainingError(f"{found}: {_store_address()}, where they meet, does not answer") from None


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. Raises ``TimeoutError`` after ``seconds``, and leaves the call to its thread.

    torch's store has a time-out, but not all its calls heed it when the network is down.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no end after {seconds} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class BoundedStore:
    """A connection to the ranks' key-value store, of which no call takes longer than ``STORE_SECONDS``."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._pending: threading.Lock = threading.Lock()  # held by a call, also after its time was up
        self.address = _store_address()

    def call(self, function: Callable[[Any], T]) -> T:
        """Return ``function(store)``.

        Raises:
            TimeoutError: the store did not answer in time, or has not yet answered an earlier call.
            RuntimeError: the store is gone.
        """
        if not self._pending.acquire(timeout=STORE_SECONDS):
            raise TimeoutError(f"{self.address} does not answer")

        def run() -> T:
            try:
                return function(self._store)
            finally:
                self._pending.release()

        return call_within(STORE_SECONDS, run)


def open_store() -> BoundedStore | None:
    """Open a new connection to the ranks' key-value store; None for a single process. Called by all ranks."""
    from torch.distributed import PrefixStore, is_initialized

    if not is_initialized():
        return None
    name = from_main(lambda: uuid.uuid4().hex)
    return BoundedStore(PrefixStore(name, call_within(2 * STORE_SECONDS, lambda: _connect(STORE_SECONDS))))


def collectives_begun() -> int | None:
    """Return how many collectives this rank has begun; None without a process group that counts them.

    Does not import torch: without it there is no process group.
    """
    torch = sys.modules.get("torch")
    try:
        return int(torch.distributed.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


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


def _store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """End the process if the ``with`` block, which connects all ranks, takes longer: gloo waits in C++."""

    def end() -> None:
        found = f"met the other ranks at {_store_address()}, but did not reach all of them within {seconds} s"
        fix = "a firewall must let all ports pass between the machines; GLOO_SOCKET_IFNAME names the interface"
        show_error(f"\nerror: rank {os.environ['RANK']}: {found}\n    -> {fix}")
        record_exit(1, is_final=False)
        end_launcher_later()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    store = _connect(timeout_seconds, is_master)
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"from/{rank}", mine)
        try:
            name = store.get(f"to/{mine}").decode()
        except DistStoreError:
            raise DistStoreError("rank 0 did not come") from None
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/all"])
        return PrefixStore(name, store)
    absent = set(range(1, world))
    begun = time.monotonic()
    is_reported = False
    while absent:
        waited = time.monotonic() - begun
        names = f"rank {', '.join(map(str, sorted(absent)))}"
        if waited > timeout_seconds:
            raise DistStoreError(f"{names} did not come")
        if waited > _QUIET_SECONDS and not is_reported:
            is_reported = True
            say(f"waiting for {names} at {_store_address()}, at most {timeout_seconds} s (--ddp_timeout)")
        for other in absent:
            if store.check([f"from/{other}"]):  # perhaps of a rank of an earlier start; the new one will overwrite it
                store.set(f"to/{store.get(f'from/{other}').decode()}", mine)
        absent = {other for other in absent if not store.check([f"{mine}/{other}"])}
        time.sleep(0.01)
    store.set(f"{mine}/all", "here")
    return PrefixStore(mine, store)
