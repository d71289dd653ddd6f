"""``--debug_distributed``: what helps to find out why ranks hang or differ, written into a folder beside the run.

Promises: what is computed stays the same. A variable that the user has set keeps its value. Nothing is pickled.
"""

import errno
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from kit import durable
from kit.errors import Problem, UserError
from kit.strategy.rendezvous import collectives_begun
from kit.strategy.strategies import DDP, Strategy

# Read by torch when it is imported, or when the process group is made.
VARIABLES = {
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_FR_BUFFER_SIZE": "20000",  # collectives that the flight recorder keeps
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
ASK = "dump"  # if the user makes a file of this name, all ranks that see it write their stacks
_POLL_SECONDS = 1.0


def folder_beside(output_dir: str) -> Path:
    """Return the folder for the files. It is not in ``output_dir``, which must be empty or hold a run."""
    return Path(f"{output_dir.rstrip('/')}.debug")


def set_variables(folder: Path, strategy: Strategy) -> None:
    """Set the environment. Call it before torch is imported; started ranks inherit it."""
    # With DETAIL the ranks compare before each collective what they are about to do. torch 2.13 then crashes when it
    # makes a DDP model (a segmentation fault in Logger.set_construction_data_and_log, seen with gloo).
    level = "INFO" if strategy == DDP else "DETAIL"
    for name, value in {"TORCH_DISTRIBUTED_DEBUG": level, **VARIABLES}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl-"))  # torch appends the rank


def record(folder: Path, stall_seconds: float) -> None:
    """Copy the output of this rank to a file, and write where it is whenever it stalls or is asked. Returns at once.

    Args:
        folder: gets ``rank-N.log``, ``rank-N.stacks.txt`` and ``rank-N.collectives.json``.
        stall_seconds: a rank that begins no new collective for this time counts as stalled.

    Raises:
        UserError: the folder cannot be made or written to, or this machine has no program ``tee``.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "is a link", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        _copy_output(folder / f"rank-{rank}.log")
    except OSError as error:
        found = f"{error.filename or folder}: {error.strerror or error}"
        fix = "leave out --debug_distributed; or choose another --output_dir"
        raise UserError(Problem("debug_distributed", found, "a folder beside output_dir to write to", fix)) from None
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # works even if this process holds Python's lock in a call that never ends
    threading.Thread(target=_write_when_stalled, args=(folder, rank, stall_seconds), daemon=True).start()


def _copy_output(log: Path) -> None:
    """Append to ``log`` what this process prints from now on."""
    durable.open_to_append(log).close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        # A process, because C++ writes to the descriptor, and because it outlives a rank that is killed.
        command = ["tee", "-a", str(log)]
        copy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stream.fileno(), start_new_session=True)
        assert copy.stdin is not None
        os.dup2(copy.stdin.fileno(), stream.fileno())
        copy.stdin.close()


def _write_when_stalled(folder: Path, rank: int, stall_seconds: float) -> None:
    """Write the state of this rank whenever it stalls or is asked, for as long as the process lives."""
    last_request = _time_of(folder / ASK)
    last_count: int | None = None
    since = time.monotonic()
    is_reported = False  # one report for each stall
    while True:
        time.sleep(_POLL_SECONDS)
        count = collectives_begun()
        if count is None or count != last_count:
            last_count = count
            since = time.monotonic()
            is_reported = False
        stalls = not is_reported and time.monotonic() - since > stall_seconds
        request = _time_of(folder / ASK)
        if not stalls and request <= last_request:
            continue
        is_reported = is_reported or stalls
        last_request = request
        with suppress(OSError):
            write_state(folder, rank)


def write_state(folder: Path, rank: int) -> None:
    """Write the stacks of all threads, and the collectives that this rank has begun, the newest last."""
    with durable.create(folder / f"rank-{rank}.stacks.txt") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    if "torch" in sys.modules:
        from torch._C import _distributed_c10d as c10d

        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # of gloo; of NCCL, where torch has it
            dump = getattr(c10d, name, None)
            text = dump() if dump else b""
            if b"profiling_name" in text:
                with durable.create(folder / f"rank-{rank}.collectives.json") as file:
                    file.write(text)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
