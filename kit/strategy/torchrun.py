"""The kit's own launcher (``torchrun_command``): torchrun, without its own words where a rank has said why it ended.

Run as a script, with the arguments of torchrun. Restarts and signals are torchrun's own; launchers meet as
kit.strategy.meeting says.

Promises: the exit status is that of the rank that failed first (128 + N if signal N killed it), or the one that the
ranks ended with after a signal. A rank that was killed is named, because it could not print anything.
"""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder: its modules would hide others

from kit import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # until torchrun sets its own handlers

from kit.console import show_error
from kit.errors import TrainingError, UserError
from kit.strategy.failure_note import (
    READ_SECONDS,
    RUN,
    FailedElsewhere,
    FailureNote,
    find_note,
    own_name,
    report_to_machines,
)
from kit.strategy.launcher import (
    ACCELERATE_PID,
    GRACE_SECONDS,
    end_with_launcher,
    recorded_exit,
    recorded_kills,
    recorded_text,
)
from kit.strategy.machines import START_ALL, Machines
from kit.strategy.store import STORE_SECONDS, BoundedStore, call_within, connect

# Prefixes of the variables that `accelerate launch` sets; `--config` overrides all of them.
INHERITED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_RENDEZVOUS = "kit"  # kit.strategy.meeting
_ORDERLY = (0, 75)  # exit statuses of ranks that finished, or were stopped by a signal (kit.failures.exits)


def torchrun_command(
    script: list[str],
    num_processes: int,
    timeout_seconds: float,
    keep_environment: bool,
    machines: Machines | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ``num_processes`` ranks on this machine, and its environment.

    Args:
        script: the path of a script and its arguments.
        timeout_seconds: how long ranks may take to end after a signal.
        keep_environment: whether the ranks take their topology from the variables of `accelerate launch`.
        machines: None: this one only.
    """
    # Without `--config` the topology comes from the environment, so the new processes need it too.
    env = {key: value for key, value in os.environ.items() if keep_environment or not key.startswith(INHERITED)}
    env = {key: value for key, value in env.items() if not key.startswith("PET_")}  # torchrun takes them for arguments
    # Without this torchrun sets it to 1 and prints a warning. ``accelerator.start`` sets the number of threads.
    env.setdefault("OMP_NUM_THREADS", "1")
    # After forwarding a signal, torchrun kills the ranks after 30 seconds. A step and its save may take longer.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(timeout_seconds)))
    command = [sys.executable, __file__, "--nproc_per_node", str(num_processes)]
    command += machines.arguments() if machines else ["--rdzv_endpoint", "localhost:0"]
    # torchrun forwards the signals that it handles, and dies of the others, such as Slurm's SIGUSR1. It must not handle
    # a signal that `nohup` made this process ignore.
    handled = [name for name in _FORWARDED_SIGNALS if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    return [*command, "--signals-to-handle", ",".join(handled), *script], env


def main(argv: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit status."""
    if os.environ.get(ACCELERATE_PID, str(os.getppid())) != str(os.getppid()):
        return 128 + signal.SIGTERM  # `accelerate launch` ended before it could be watched from here
    end_with_launcher()
    os.environ[interrupt.OWN_TORCHRUN] = "1"
    # torch reads this at its import. Its store warns of every name that it cannot resolve, and of ranks that left.
    is_quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError, RendezvousTimeoutError

    from kit.strategy.meeting import register

    if is_quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks may warn
    if "LOGLEVEL" not in os.environ:  # by which users of torchrun ask for its log
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic."):
                logging.getLogger(name).setLevel(logging.ERROR)
                logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith("failed (exitcode"))
    interrupt.raise_on_ctrl_c()
    register(_RENDEZVOUS)
    arguments = run.parse_args(["--rdzv_backend", _RENDEZVOUS, *argv])
    machines = Machines.from_arguments(arguments)
    try:
        if machines:
            arguments.local_addr = machines.reach_store()  # by which the others reach this machine; else its host name
            threading.Thread(target=_watch_failures, args=(machines,), daemon=True).start()
        run.run(arguments)
    except UserError as error:
        show_error(f"\n{error}")
        return error.exit_status
    except TrainingError as error:
        show_error(f"\nerror: {error}")
        return 1
    except RendezvousTimeoutError:
        found = f"fewer than {arguments.nnodes} machines came to {arguments.rdzv_endpoint} in time (--ddp_timeout)"
        show_error(f"\nerror: {found}\n    -> {START_ALL}")
        return 1
    except (RendezvousError, DistError) as error:
        if machines is None:
            raise
        if _ends_as:
            return _end_of_thread()
        status = recorded_exit(os.getpid())
        if status is None or isinstance(error, RendezvousStateError):  # else a rank has said why
            show_error(f"\nerror: {_loss_of_machines(error, arguments.rdzv_endpoint)}")
            return 1
        return status
    except ChildFailedError as error:
        if _ends_as:
            return _end_of_thread()
        rank, failure = error.get_first_failure()  # torchrun ended the others
        if failure.exitcode >= 0:
            if failure.exitcode == interrupt.STATUS:
                _report_ctrl_c()
            return failure.exitcode
        if failure.pid in recorded_kills(os.getpid()):  # by a rank that has said why
            return recorded_exit(os.getpid()) or 1
        cause = ", as Linux does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        show_error(f"\nerror: rank {rank} was killed by {failure.signal_name()}{cause}")
        return 128 - failure.exitcode
    except (SignalException, KeyboardInterrupt) as error:
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        status = recorded_exit(os.getpid())
        if number == signal.SIGINT and status in (None, interrupt.STATUS):
            _report_ctrl_c()
        if status is not None:
            return status
        if machines:
            text = f"{signal.Signals(number).name} ended it before it was training"
            report_to_machines(machines, FailureNote(own_name(), 128 + number, text), READ_SECONDS)
        return 128 + number
    return 0


def _report_ctrl_c() -> None:
    """Report Ctrl-C for all ranks, which leave it to this process: each of them gets it."""
    show_error("\nstopped by Ctrl-C; the same command starts again")


def _loss_of_machines(error: Exception, where: str) -> str:
    """Say why this machine cannot meet the others at ``where``. A machine that ended has reported why."""
    if type(error).__name__ == "RendezvousStateError":
        fix = "another program reaches this port: docs/multi-node.md says what the network must be"
        return f"{where} does not hold what the launchers of a run write: {error}\n    -> {fix}"
    cause: BaseException = error
    while cause.__cause__:
        cause = cause.__cause__
    found = f"this machine lost the others, who meet at {where}: {str(cause).splitlines()[0]}"
    return f"{found}\n    -> the machine that ended first says why; then {START_ALL}"


def _watch_failures(machines: Machines) -> None:
    """End as the rank did that failed, also if torchrun then waits for a machine that it cannot reach.

    The other machines of the run read why, and end too, also while they wait or check data.
    """
    store: BoundedStore | None = None
    silent, before = 0.0, time.monotonic()  # seconds without an answer; a pause of this process counts for little
    while True:
        status = recorded_exit(os.getpid())
        if status is not None and status not in _ORDERLY:
            begun = time.monotonic()
            if text := recorded_text(os.getpid()):  # else a rank ended because of another machine
                report_to_machines(machines, FailureNote(own_name(), status, text), READ_SECONDS)
            time.sleep(max(0.0, begun + GRACE_SECONDS / 2 - time.monotonic()))
            os._exit(status)
        try:
            if store is None:
                connection = call_within(
                    2 * STORE_SECONDS, lambda: connect(machines.address, machines.port, STORE_SECONDS)
                )
                store = BoundedStore(connection, machines.address)
            if note := store.call(lambda store: find_note(store, os.environ[RUN])):
                _end_as(note)
            silent = 0.0
        except (OSError, RuntimeError):  # the store is not there yet, or no more
            store = None
        silent += min(time.monotonic() - before, 3 * STORE_SECONDS)
        before = time.monotonic()
        if silent > machines.timeout_seconds + GRACE_SECONDS and not psutil.Process().children():
            # torch waits for ever in some calls of a store. Ranks need no help: each of them has a time-out.
            where = f"{machines.address}:{machines.port}"
            show_error(
                f"\nerror: {where}, where the machines meet, did not answer {socket.gethostname()} for {silent:.0f} s"
            )
            os._exit(1)
        time.sleep(1.0)


def _end_as(note: FailureNote) -> None:
    """End because another machine failed, unless the ranks of this one report that, or why they failed themselves."""
    _ends_as.append(note)
    ranks = psutil.Process().children(recursive=True)
    end = time.monotonic() + 2 * READ_SECONDS
    while ranks and time.monotonic() < end:
        if recorded_exit(os.getpid()) not in (None, *_ORDERLY):
            return
        time.sleep(0.2)
    show_error(f"\nerror: {FailedElsewhere(note)}")
    for rank in ranks:
        with suppress(psutil.Error):
            rank.terminate()
    for rank in psutil.wait_procs(ranks, timeout=READ_SECONDS)[1]:
        with suppress(psutil.Error):
            rank.kill()
    time.sleep(0.5)  # until who left the note knows that it was read: the store may end with this process
    os._exit(note.status)


def _end_of_thread() -> int:
    """Wait until ``_end_as`` has ended this process; it takes some seconds."""
    time.sleep(5 * READ_SECONDS)
    return _ends_as[0].status


_ends_as: list[FailureNote] = []  # the note of another machine that was read: none or one


def launch(argv: list[str]) -> NoReturn:
    """Run ``main``, and end this process with its exit status."""
    # Not sys.exit: a thread that comes back from a call of the store, while the interpreter ends, aborts the process.
    os._exit(main(argv))


if __name__ == "__main__":
    launch(sys.argv[1:])
