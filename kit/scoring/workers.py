"""Worker processes: they run code of the user, and answer questions of the run.

Promises: one that hangs, exits, prints or starts processes costs the run nothing but its time. When the run closes its
end of the connection, or is killed, the process ends, and so does everything that it started.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 120  # for a process to import the user's files
_POLL_SECONDS = 0.25  # between two checks whether the run stops
_REST_SECONDS = 5  # for the rest of an answer that has begun: the user's code may write to any file descriptor
_MAX_BYTES = 1 << 20  # of an answer
_PR_SET_CHILD_SUBREAPER = 36  # the number of this option of Linux's prctl

Answer = Callable[[Connection], None]  # what a worker does, until the other end of its connection is closed


class Worker:
    """A process that answers questions."""

    def __init__(
        self, start: Callable[[Connection], subprocess.Popen[bytes] | None], is_stopping: Callable[[], bool]
    ) -> None:
        """
        Args:
            start: the process, given its end of the connection. None: it is no child of this one.
            is_stopping: whether the run was asked to stop, and so does not wait for answers.
        """
        self._is_stopping = is_stopping
        self.connection, theirs = Pipe()
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _REST_SECONDS, 0))
        with theirs:
            self._process = start(theirs)

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer, a JSON value.

        Raises:
            TimeoutError: it took too long, or the run stops.
            OSError, EOFError, ValueError: the process ended, or sent no answer.
        """
        end = time.monotonic() + seconds
        self.connection.send(question)
        while not self.connection.poll(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end or self._is_stopping():
                raise TimeoutError
        return json.loads(self.connection.recv_bytes(_MAX_BYTES))

    def end(self) -> None:
        """End the process and those that it started."""
        self.connection.close()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(START_SECONDS)


def start_worker(answer: Answer, theirs: Connection, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process that answers. Not a fork, which would have the run's threads and its GPU.

    Args:
        answer: a function of a module.
        theirs: its end of the connection.
        variables: of its environment.
    """
    number = theirs.fileno()
    code = (
        f"import sys; sys.path = {sys.path!r}; from {answer.__module__} import {answer.__name__} as answer; "
        f"from kit.scoring.workers import serve; serve(answer, {number})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[number],
        start_new_session=True,
        # In the run and in one that was resumed, a set of strings has the same order.
        env={"PYTHONHASHSEED": "0", **os.environ, **variables},
    )


def serve(answer: Answer, number: int) -> None:
    """Answer in a child of this process until it ends, or the other end of the connection is closed.

    Then this process ends all its children, and so those of its children, which become its own.

    Args:
        number: of this end of the connection.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with contextlib.suppress(OSError):  # without memory, the kernel ends this process and not the run
                Path("/proc/self/oom_score_adj").write_text("1000")
            answer(Connection(number))
        finally:
            os._exit(0)
    threading.Thread(target=_end_after, args=(number, child), daemon=True).start()
    while os.wait()[0] != child:
        pass
    with contextlib.suppress(OSError):  # where there is no /proc
        os.killpg(child, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(OSError):
                for pid in children.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


def _end_after(number: int, child: int) -> None:
    """End ``child`` when the other end of the connection is closed."""
    closed = select.poll()
    closed.register(number, 0)  # of no event but the end
    closed.poll()
    os.kill(child, signal.SIGKILL)


def answer_each(connection: Connection, reply: Callable[[Any], Any]) -> None:
    """Answer each question in turn with the JSON value that ``reply`` returns for it."""
    own = os.getpid()
    with contextlib.suppress(EOFError):
        while True:
            content = json.dumps(reply(connection.recv())).encode()
            if os.getpid() != own:  # the user's code forked
                return
            connection.send_bytes(content)


def result_of(value: Any) -> Any:
    """Return what a function of the user returned; what a coroutine returns, if it is async."""
    return _runner().run(value) if inspect.iscoroutine(value) else value


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()  # one for all: what belongs to its event loop stays usable
