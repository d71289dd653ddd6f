"""Rendezvous of the ranks: key-value store, check that they agree, process group.

Promises: no call of the store waits longer than a time-out of ours, whatever the network does.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kit.strategy.processes.agreement import Fact, exchange
from kit.strategy.processes.launcher import launched_rank, started_again
from kit.strategy.processes.network import check_main_address, check_own_name, is_own, use_loopback
from kit.strategy.processes.tcp_store import STORE_SECONDS, BoundedStore, call_within, connect
from kit.system.console import say, show_error
from kit.system.errors import Problem, Problems, TrainingError, UserError, first_line, raise_if

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

# The time-out of a collective, in units of ``ddp_timeout``. It is long, because ranks may wait for a slow disk;
# ``kit.failures.watch`` detects a hang earlier.
COLLECTIVE_TIMEOUTS = 10
_KEPT_SECONDS = 15.0  # for a connection to a store that a launcher keeps
_QUIET_SECONDS = 3.0  # that rank 0 waits for others before it prints that


def collective_timeout(timeout_seconds: float) -> timedelta:
    """Return the time-out of a collective, from ``ddp_timeout``."""
    return timedelta(seconds=COLLECTIVE_TIMEOUTS * timeout_seconds)


def join_group(backend: str | None, timeout_seconds: float, facts: Sequence[Fact] = ()) -> None:
    """Join the process group of all ranks, after a check that they agree on ``facts``.

    Args:
        backend: of torch.distributed; None: torch chooses.
        timeout_seconds: how long to wait for all ranks. The time-out of the group's collectives is
            ``COLLECTIVE_TIMEOUTS`` times as long.
        facts: must be the same on all ranks.

    Raises:
        TrainingError: not all ranks joined within ``timeout_seconds``.
        UserError: ranks differ in ``facts``, a machine has a name that others cannot use, or the port of the
            rendezvous is in use.
    """
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    launched = launched_rank()
    others = launched is not None and launched.several_machines
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # set by torchrun, which started this machine only
        use_loopback()
    if others and not is_own(os.environ["MASTER_ADDR"]):
        raise_if(check_main_address(os.environ["MASTER_ADDR"], "MASTER_ADDR"))

    def join() -> tuple[Any, list[Problem]]:
        store = _join_store(rank, world, timeout_seconds)
        return store, exchange(store, rank, world, facts, check_own_name() if others else [])

    try:
        store, problems = call_within(timeout_seconds + STORE_SECONDS, join)
        raise_if(problems)
        timeout = collective_timeout(timeout_seconds)
        with _ending_after(timeout_seconds):
            torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (torch.distributed.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            where, found = "MASTER_PORT", f"{os.environ['MASTER_PORT']} is in use on this machine"
            raise UserError(where, found, "a free port", "the launcher's --master_port sets it") from None
        is_late = isinstance(error, TimeoutError)
        why = f"the rendezvous store at {_store_address()} does not answer" if is_late else first_line(error)
        raise TrainingError(
            f"not all {world} processes joined within {timeout_seconds} s (--ddp_timeout): {why}"
        ) from None


def open_store() -> BoundedStore | None:
    """Open a new connection to the ranks' key-value store, for their statuses; None for a single process.

    Raises:
        TrainingError: the store does not answer.
    """
    from torch.distributed import PrefixStore, is_initialized

    if not is_initialized():
        return None
    try:
        store = call_within(2 * STORE_SECONDS, lambda: _connect(STORE_SECONDS))
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's errors of a store are such
        raise _no_answer(error) from None
    return BoundedStore(PrefixStore("status", store), _store_address())


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
    """Call ``make`` on the main process only, and return its value on all ranks. Called by all ranks.

    The value is small and can be pickled.
    """
    import torch

    if not torch.distributed.is_initialized():
        return make()
    values = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]


def _connect(timeout_seconds: float, keeps_store: bool = False) -> Any:
    return connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_seconds, keeps_store)


def _store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _no_answer(error: Exception) -> TrainingError:
    found = f"the rendezvous store at {_store_address()} does not answer {socket.gethostname()} ({first_line(error)})"
    fix = "the launcher of rank 0 ended (see the output on its machine), or the network is down"
    return TrainingError(f"{found}\n    -> {fix}")


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """End the process if the ``with`` block, which connects all ranks, takes longer: gloo waits in C++."""

    def end() -> None:
        found = f"joined at {_store_address()}, but did not connect to all other ranks within {seconds} s"
        fix = "a firewall must let all ports pass between the machines; GLOO_SOCKET_IFNAME names the interface"
        show_error(f"\nerror: rank {os.environ['RANK']}: {found}\n    -> {fix}")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join_store(rank: int, world: int, timeout_seconds: float) -> Any:
    """Return the ranks' key-value store once all have joined.

    Raises:
        torch.distributed.DistError: not all ranks joined within ``timeout_seconds``.
        UserError: ranks joined this store before: the launcher restarted them.
    """
    from torch.distributed import DistStoreError

    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher of rank 0, from the start on
    try:
        store = _connect(min(timeout_seconds, _KEPT_SECONDS) if is_kept else timeout_seconds, not is_kept and rank == 0)
    except OSError as error:
        if not is_kept:
            raise TimeoutError from None
        raise _no_answer(error) from None
    if store.add(f"here/{rank}", 1) > 1:
        raise UserError(started_again())
    if rank:
        store.wait(["all"], timedelta(seconds=timeout_seconds))
        return store
    absent = set(range(1, world))
    begun = time.monotonic()
    is_reported = False
    while absent := {other for other in absent if not store.check([f"here/{other}"])}:
        waited = time.monotonic() - begun
        names = f"rank {', '.join(map(str, sorted(absent)))}"
        if waited > timeout_seconds:
            raise DistStoreError(f"{names} did not join")
        if waited > _QUIET_SECONDS and not is_reported:
            is_reported = True
            say(f"waiting for {names} at {_store_address()}, at most {timeout_seconds} s (--ddp_timeout)")
        time.sleep(0.01)
    store.set("all", "here")
    return store
