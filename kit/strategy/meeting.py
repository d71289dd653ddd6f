"""How the launchers of a run meet, one on each machine, and the store by which their ranks meet afterwards.

This is torch's rendezvous ``c10d``, with promises that torch does not give:

- A launcher counts as dead if it is silent, not because its clock differs. torch compares a time of another machine
  with the own clock, and starts without that machine.
- Nothing that comes over the network is executed. torch unpickles what is in the store, which has no password.
- Stores listen on one address: on one machine loopback, else the own address in the network of the machines.
"""

import io
import pickle
import socket
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from kit.strategy.network import address_of

_LOOPBACK = "127.0.0.1"
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 5, 3  # torch's: a launcher that was silent for 15 s is dead
# The types of which the state of a rendezvous is made. Their constructors do nothing but hold values.
_TYPES = (dynamic._RendezvousState, dynamic._NodeDesc, datetime, timedelta, timezone, set)
_KNOWN: dict[tuple[str, str], Any] = {(known.__module__, known.__name__): known for known in _TYPES}


def register(name: str) -> None:
    """Let ``--rdzv_backend name`` of torchrun mean this rendezvous. At port 0 it is for one machine."""
    dynamic.datetime = _SteadyClock  # type: ignore[assignment, misc]
    rendezvous_handler_registry.register(name, _make_handler)


def _make_handler(parameters: RendezvousParameters) -> "_Handler":
    store: Store
    address: str | None
    host, _, port = parameters.endpoint.rpartition(":")
    if port == "0":  # no other launcher could know the port
        store, address = HashStore(), _LOOPBACK
    else:
        store, address = _open_store(parameters, host, int(port)), parameters.local_addr
    seconds = parameters.get_as_int("join_timeout")
    settings = dynamic.RendezvousSettings(
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        dynamic.RendezvousTimeout(join=timedelta(seconds=seconds) if seconds else None),
        timedelta(seconds=_KEEP_ALIVE_SECONDS),
        _KEEP_ALIVE_ATTEMPTS,
    )
    holder = _StateHolder(_Backend(store, parameters.run_id), settings)
    node = _Handler._node_desc_generator.generate(address)
    return _Handler(node, settings, parameters.backend, store, holder)


def _open_store(parameters: RendezvousParameters, host: str, port: int) -> TCPStore:
    """The store by which all launchers meet; this one serves it or connects to it."""
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout") or 60)
    try:
        if parameters.get_as_bool("is_host"):
            return _serve(host, port, timeout)
        return TCPStore(host, port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error


def _serve(name: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens on the address behind ``name``, and not on every address of this machine as torch's do."""
    address = address_of(name)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


class _Handler(dynamic.DynamicRendezvousHandler):
    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """The store of the ranks."""
        return _serve(master_addr, master_port, timedelta(minutes=5))


class _StateHolder(dynamic._BackendRendezvousStateHolder):
    """Drops launchers whose heartbeat did not change for a while, by the own clock."""

    def __init__(self, backend: "_Backend", settings: dynamic.RendezvousSettings) -> None:
        super().__init__(backend, settings)
        # Of each launcher its last heartbeat, a time of its own clock, and when it was first seen here.
        self._seen: dict[dynamic._NodeDesc, tuple[datetime, datetime]] = {}

    def _sanitize(self) -> None:
        now = _SteadyClock.now(UTC)
        beats = self._state.last_heartbeats
        self._seen = {
            node: self._seen[node] if node in self._seen and self._seen[node][0] == beat else (beat, now)
            for node, beat in beats.items()
        }
        self._state.last_heartbeats = {node: seen for node, (_, seen) in self._seen.items()}
        super()._sanitize()
        self._state.last_heartbeats = {node: beats[node] for node in self._state.last_heartbeats}


class _SteadyClock:
    """``datetime`` for torch's rendezvous: correcting the machine's clock stops no heartbeat."""

    _began, _began_monotonic = datetime.now(UTC), time.monotonic()

    @classmethod
    def now(cls, tz: timezone) -> datetime:
        return (cls._began + timedelta(seconds=time.monotonic() - cls._began_monotonic)).astimezone(tz)


class _Backend(C10dRendezvousBackend):
    """Refuses a state that is not made of ``_TYPES`` alone, before torch unpickles it."""

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        decoded = super()._decode_state(base64_state)
        if decoded:
            try:
                _Checking(io.BytesIO(decoded[0])).load()
            except Exception as error:  # whatever a malformed pickle causes
                raise RendezvousStateError(f"the state of the rendezvous is not torch's: {error}") from None
        return decoded


class _Checking(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _KNOWN[module, name]
