"""Connections to torch's key-value store, for the rendezvous of several machines.

Promises: no call waits longer than a time-out of ours, whatever the network does. A store that a launcher keeps listens
on one address.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from kit.strategy.processes.network import address_of

T = TypeVar("T")

_RETRY_SECONDS = 0.2
STORE_SECONDS = 3.0  # how long a call of the key-value store may take


def serve(name: str, port: int, timeout_seconds: float) -> Any:
    """Keep a store at the address of ``name`` until this process ends. torch's own listen on every address.

    Args:
        port: 0: a free one.

    Raises:
        OSError: the port is taken.
    """
    from torch.distributed import TCPStore

    address = address_of(name)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family)
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def connect(address: str, port: int, timeout_seconds: float, keeps_store: bool = False) -> Any:
    """Connect to the store at an address; ``keeps_store``: keep one there, until this process ends.

    Raises:
        OSError: no answer there within ``timeout_seconds``; a ``TimeoutError`` is one.
        torch.distributed.DistError: it is not a store, or the port is taken.
    """
    from torch.distributed import TCPStore

    end = time.monotonic() + timeout_seconds
    while not keeps_store:
        try:  # torch would print its stack for each attempt
            socket.create_connection((address, port), max(0.1, end - time.monotonic())).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=keeps_store, timeout=timeout, wait_for_workers=False)


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
    """A connection to a key-value store, of which no call takes longer than ``STORE_SECONDS``."""

    def __init__(self, store: Any, address: str) -> None:
        """``address``: of the store, for messages."""
        self._store = store
        self._pending: threading.Lock = threading.Lock()  # held by a call, also after its time was up
        self.address = address

    def call(self, function: Callable[[Any], T]) -> T:
        """Return ``function(store)``.

        Raises:
            TimeoutError: the store did not answer in time, or has not yet answered an earlier call.
            RuntimeError: the store no longer exists.
        """
        if not self._pending.acquire(timeout=STORE_SECONDS):
            raise TimeoutError(f"{self.address} does not answer")

        def run() -> T:
            try:
                return function(self._store)
            finally:
                self._pending.release()

        return call_within(STORE_SECONDS, run)
