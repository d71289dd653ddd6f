"""The kit's own launcher: torchrun (``torch.distributed.run``) with a rendezvous of its own (``_Rendezvous``).

``kit.strategy.launch.torchrun`` makes the command that runs this file. Signals are torchrun's own.

Promises:

- The exit status is that of the first rank that reports a failure, or the one that the ranks ended with after a
  signal. If none reports anything, a rank that signal N killed is named, and the status is 128 + N.
- The store listens on one address, and nothing in it is unpickled. No clock is compared with that of another machine.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not this folder: its modules would hide others

from kit.system import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # until torchrun sets its own handlers

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from kit.strategy.launch.torchrun import RENDEZVOUS, START_ALL
from kit.strategy.processes.launcher import ACCELERATE_PID, end_with_launcher
from kit.strategy.processes.tcp_store import BoundedStore, connect, serve
from kit.system.console import show_error
from kit.system.errors import TrainingError, UserError

_GRACE_SECONDS = 20.0  # in which ranks report by themselves that those of another machine exited


class _Rendezvous(RendezvousHandler):
    """The launchers of a run join one store, at the address of the config; the ranks then use it too."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, _, port = parameters.endpoint.rpartition(":")
        self._address, self._port = host, int(port)
        self._count = parameters.max_nodes
        self._is_host = bool(parameters.get_as_bool("is_host"))
        self._seconds = parameters.get_as_int("join_timeout") or 60
        self._run_id = parameters.run_id
        self._store: BoundedStore | None = None
        self._failed_at = 0.0  # when another launcher was first seen to have failed

    def get_backend(self) -> str:
        return RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store, where = self._open(), f"{self._address}:{self._port}"
        if self._is_host:
            self._port = store.port
        number = 0 if self._is_host else store.add("others", 1)
        end = time.monotonic() + self._seconds
        self._store = BoundedStore(store, where)
        try:
            while (others := self._store.call(lambda store: store.add("others", 0))) < self._count - 1:
                if time.monotonic() > end:
                    found = f"{others + 1} of {self._count} machines joined at {where} within {self._seconds} s"
                    raise TrainingError(f"{found} (--ddp_timeout)\n    -> {START_ALL}")
                time.sleep(0.2)
        except (TimeoutError, RuntimeError):
            raise TrainingError(
                f"{socket.gethostname()} lost the connection to the rendezvous store at {where}"
            ) from None
        if number >= self._count:
            raise TrainingError(f"{where} has {self._count} machines already: this command runs twice on one of them")
        return RendezvousInfo(store, number, self._count, RendezvousStoreInfo(self._address, self._port))

    def _open(self) -> TCPStore:
        host = socket.gethostname()
        try:
            if self._is_host:
                return serve(self._address, self._port, self._seconds)
            return connect(self._address, self._port, self._seconds)
        except OSError as error:
            if self._is_host:
                found, fix = f"{self._port} on {host}: {error.strerror}", "another one, the same on every machine"
                raise UserError("main_process_port", found, "a free port", fix) from None
            found = f"{host} did not reach {self._address}:{self._port} (main_process_ip) within {self._seconds} s"
            raise TrainingError(f"{found} (--ddp_timeout)\n    -> {START_ALL}") from None

    def num_nodes_waiting(self) -> int:
        """None: ranks are not restarted. torchrun polls it, so it reports here that another launcher failed."""
        with suppress(TimeoutError, RuntimeError):  # the ranks notice a lost store too
            if self._count > 1 and self._store is not None:
                failed = self._store.call(lambda store: store.get("failed") if store.check(["failed"]) else b"")
                self._failed_at = self._failed_at or (time.monotonic() if failed else 0.0)
                if failed and time.monotonic() > self._failed_at + _GRACE_SECONDS:
                    raise TrainingError(f"{failed.decode()} ended this run: see its output")
        return 0

    def tell_failure(self) -> None:
        """Let the other launchers know that this one ends because its ranks failed."""
        with suppress(TimeoutError, RuntimeError):
            if self._count > 1 and self._store is not None:
                self._store.call(lambda store: store.set("failed", socket.gethostname()))
                time.sleep(1.0)  # the store may end with this process

    def shutdown(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self._run_id


def main(argv: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit status."""
    joined: list[_Rendezvous] = []

    def make(parameters: RendezvousParameters) -> _Rendezvous:
        joined.append(_Rendezvous(parameters))
        return joined[0]

    status = _run(argv, make)
    if status and joined:
        joined[0].tell_failure()
    return status


def _run(argv: list[str], make: Callable[[RendezvousParameters], _Rendezvous]) -> int:
    if os.environ.get(ACCELERATE_PID, str(os.getppid())) != str(os.getppid()):
        return 128 + signal.SIGTERM  # `accelerate launch` ended before it could be watched from here
    end_with_launcher()
    logging.disable()  # torchrun's log, which repeats the errors of the ranks
    file, path = tempfile.mkstemp(prefix="kit-status-")
    os.close(file)
    os.environ[interrupt.OWN_TORCHRUN] = path
    rendezvous_handler_registry.register(RENDEZVOUS, make)
    try:
        run.run(run.parse_args(["--rdzv_backend", RENDEZVOUS, *argv]))
    except UserError as error:
        show_error(f"\n{error}")
        return error.exit_status
    except TrainingError as error:
        show_error(f"\nerror: {error}")
        return 1
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if status := next((each.exitcode for each in error.failures.values() if each.exitcode > 0), 0):
            return status
        cause = ", as Linux does when memory runs out" if first.exitcode == -signal.SIGKILL else ""
        show_error(f"\nerror: rank {rank} was killed by {first.signal_name()}{cause}")
        return 128 - first.exitcode
    except (SignalException, KeyboardInterrupt) as error:
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        return int(Path(path).read_text() or 128 + number)
    finally:
        os.unlink(path)
    return 0


if __name__ == "__main__":
    # Not sys.exit: a thread that comes back from a call of the store, while the interpreter ends, aborts the process.
    os._exit(main(sys.argv[1:]))
