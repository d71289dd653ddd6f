"""Rewards of answers that the model wrote: numbers by rules, or by a function of the user.

Promises: they are computed in processes of their own, so that one which hangs, ends its process, prints or starts
others costs the run nothing but its time. What fails is no number but a line that says why.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from kit import own_metric
from kit.answers import METRICS
from kit.errors import Problem, UserError

_START_SECONDS = 120  # in which a process must have imported the user's files
_LOOK_SECONDS = 0.5  # between two looks at whether the run stops


class Asked(NamedTuple):
    """One answer of the model, and what it is judged by."""

    expected: str
    answer: str
    row: Any  # of the data set; None if no reward of the user reads it
    origin: str  # ``train.jsonl:17``
    num_tokens: int  # of the answer
    max_new_tokens: int


def key_of(name: str) -> str:
    """Return the name of a reward in metrics: that of the function, or what stands before a colon."""
    return own_metric.key_of(name) if own_metric.is_own(name) else name.partition(":")[0]


def reward(name: str, asked: Asked) -> float:
    """Return one reward of an answer; raises what a function of the user raises, see ``own_metric.score``.

    - the names of ``kit.answers.METRICS``, from 0 to 1;
    - ``math``: 1 if the answer is the expected one as mathematics, by math-verify;
    - ``json``: 1 if the answer is JSON;
    - ``regex:PATTERN``: 1 if the pattern is found in the answer;
    - ``overlong:N``: 0, and down to -1 over the last N of ``max_new_tokens``: https://arxiv.org/abs/2503.14476,
      equation 13.
    """
    kind, _, value = name.partition(":")
    if own_metric.is_own(name):
        return own_metric.score(name, asked.expected, asked.answer, asked.row, asked.origin)
    if kind == "math":
        from math_verify import parse, verify

        return float(verify(parse(asked.expected), parse(asked.answer)))
    if kind == "json":
        try:
            json.loads(asked.answer)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0
    if kind == "regex":
        return float(re.search(value, asked.answer, re.DOTALL) is not None)
    if kind == "overlong":
        return min(0.0, (asked.max_new_tokens - asked.num_tokens) / int(value) - 1)
    return METRICS[name](asked.answer, asked.expected)


def try_rewards(names: Sequence[str], timeout_seconds: float, asked: Asked) -> None:
    """Give the user's rewards the expected answer of a row, before the model is loaded.

    Raises:
        UserError: one fails.
    """
    own = [name for name in names if own_metric.is_own(name)]
    for found in Scorer(own, timeout_seconds, 1)([asked])[0] if own else ():
        if isinstance(found, str):
            raise UserError(Problem("--rewards", f"the expected answer of a row has no reward: {found}"))


class Scorer:
    """Computes the rewards of answers, several at a time. Its processes end with the one that made it."""

    def __init__(
        self,
        names: Sequence[str],
        timeout_seconds: float,
        num_workers: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            timeout_seconds: for one reward of an answer.
            is_stopping: whether the run was asked to stop, which does not wait for rewards.
        """
        self._names = tuple(names)
        self._timeout = timeout_seconds
        self._is_stopping = is_stopping
        self._threads = ThreadPoolExecutor(num_workers)
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def __call__(self, asked: Sequence[Asked]) -> list[list[float | str]]:
        """Return of each answer its rewards, in the order of the names; in place of one that failed, why.

        A stop leaves out those that were not computed by then.
        """
        return list(self._threads.map(self._score, asked))

    def _score(self, asked: Asked) -> list[float | str]:
        worker = self._idle.get()
        found: list[float | str] = []
        try:
            for k in range(len(self._names)):
                if self._is_stopping():
                    break
                answer, why = None, f"took more than {self._timeout:g} s (row {asked.origin})"
                try:
                    worker = worker or _Worker(self._names, self._timeout, self._is_stopping)
                    answer = worker.ask(k, asked)
                except (EOFError, OSError):
                    why = f"ended its process (row {asked.origin})"
                if answer is None and worker is not None:
                    worker.end()
                    worker = None
                if answer is not None or not self._is_stopping():
                    found.append(why if answer is None else answer)
        finally:
            self._idle.put(worker)
        return found


class _Worker:
    """A process that computes rewards. It has a session of its own, so that what it starts ends with it."""

    def __init__(self, names: tuple[str, ...], timeout: float, is_stopping: Callable[[], bool]) -> None:
        self._timeout, self._is_stopping = timeout, is_stopping
        self._connection, theirs = Pipe()
        code = f"import sys; sys.path = {sys.path!r}; from kit.rewards import serve; serve({theirs.fileno()})"
        # Not a fork, which would have the run's threads and its GPU.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            self._connection.send((names, timeout, os.getpid()))
            if not self._has_answered(_START_SECONDS):
                raise OSError
            self._connection.recv()
        except (EOFError, OSError):
            self.end()
            raise

    def ask(self, number: int, asked: Asked) -> float | str | None:
        """Return one of the rewards, by its place among the names; None if it took too long, or the run stops.

        Raises ``EOFError`` or ``OSError`` if the process ended.
        """
        self._connection.send((number, asked))
        if not self._has_answered(self._timeout):
            return None
        answer: float | str = self._connection.recv()
        return answer

    def _has_answered(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._connection.poll(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
            if self._is_stopping() or time.monotonic() >= end:
                return False
        return True

    def end(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


def serve(number: int) -> None:
    """Compute rewards in this process until the one that asks has ended. ``number``: that of its end of the pipe."""
    connection: Connection[Any, Any] = Connection(number)
    names, timeout, parent = connection.recv()
    own = os.getpid()
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    for name in filter(own_metric.is_own, names):
        own_metric.load(name)
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            number, asked = connection.recv()
            # If the run was killed meanwhile, and a reward does not let the thread run.
            signal.alarm(int(timeout) + 30)
            answer = _number_or_why(names[number], asked)
            if os.getpid() != own:  # a reward forked; a second answer would be taken for that to the next question
                os._exit(0)
            connection.send(answer)
            signal.alarm(0)
    os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """End this process and those that it started once ``parent`` has ended, also in the middle of a reward."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _number_or_why(name: str, asked: Asked) -> float | str:
    try:
        return reward(name, asked)
    except own_metric.MetricError as error:
        (problem,) = error.problems
        return f"{problem.where}: {problem.found}"
    except Exception as error:  # of a library, given any text
        return f"{key_of(name)}: {type(error).__name__}: {error} (row {asked.origin})"
