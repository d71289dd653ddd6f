"""Reward functions: rules, or a function of the user.

Promises: they run in separate processes, so that one which hangs, exits, prints or starts processes costs the run
nothing but its time. A failed reward is a line that says why.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from kit.scoring import own_metric
from kit.scoring.metrics import Metric

_START_SECONDS = 120  # for a process to import the user's files
_POLL_SECONDS = 0.5  # between two checks whether the run stops
_MAX_WORKERS = 8  # processes that compute rewards, each called by a thread
_PR_SET_CHILD_SUBREAPER = 36  # the number of this option of Linux's prctl

_DELIMITERS = re.compile(r"(?<!\\)\$|\\boxed|\\[(\[]")
_COMMAND = re.compile(r"\\[A-Za-z]+(\{[^{}]*\})?")
_WORDS = re.compile(
    r"[A-Za-z]{4,}\b(?!\()|[A-Za-z]{2,}\s+[A-Za-z]{2,}|\b(?!ln|lg)[a-z]{2}\s+\d|\d\s+(?!ln|lg|log|pi|sin|cos|tan)[A-Za-z]{2,}"
)


class Attempt(NamedTuple):
    """A generated answer, and what its rewards need."""

    expected: str
    answer: str
    row: Any  # of the dataset; None if no reward of the user reads it
    origin: str  # ``train.jsonl:17``
    num_tokens: int  # of the answer
    max_new_tokens: int


def reward(name: str, attempt: Attempt) -> float:
    """Return one reward of an answer; raises as a function of the user does, see ``own_metric.score``.

    - the names of ``kit.scoring.metrics.METRICS``, from 0 to 1;
    - ``math``: 1 if the answer is the expected one as mathematics, by math-verify;
    - ``json``: 1 if the answer is JSON;
    - ``regex:PATTERN``: 1 if the pattern is found in the answer;
    - ``overlong:N``: length penalty, 0 and down to -1 over the last N of ``max_new_tokens``:
      https://arxiv.org/abs/2503.14476, equation 13.
    """
    kind, _, value = name.partition(":")
    if kind == "math":
        from math_verify import verify

        if not (expected := read_math(attempt.expected)):
            raise ValueError(f"math-verify cannot read {attempt.expected[:60]!r}")
        return float(verify(expected, read_math(attempt.answer)))
    if kind == "json":
        try:
            json.loads(attempt.answer)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0
    if kind == "regex":
        return float(re.search(value, attempt.answer, re.DOTALL) is not None)
    if kind == "overlong":
        return min(0.0, (attempt.max_new_tokens - attempt.num_tokens) / int(value) - 1)
    return Metric(name).values(attempt.expected, attempt.answer, attempt.row, attempt.origin)[0]


@lru_cache(1000)  # the expected text of all answers to a prompt
def read_math(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in a text; none if it finds no whole one.

    It takes LaTeX only between delimiters: of ``2\\sqrt{3}`` it would read the 2. So a text without any is read as one
    formula; prose only if nothing is found in it.
    """
    from math_verify import parse

    forms = [text]
    if not _DELIMITERS.search(text):
        forms.insert(1 if _WORDS.search(_COMMAND.sub("", text)) else 0, f"${text}$")
    for form in forms:
        found: list[Any] = parse(form)
        if found and not isinstance(found[0], str):
            return found
    return []


class Scorer:
    """Computes rewards in the background, several at a time."""

    def __init__(
        self,
        names: Sequence[str],
        timeout_seconds: float,
        num_cores: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            timeout_seconds: for one reward of an answer.
            is_stopping: whether the run was asked to stop, and so does not wait for rewards.
        """
        self._names = tuple(names)
        self._timeout = timeout_seconds
        self._is_closed = False
        self._is_stopping = lambda: self._is_closed or is_stopping()
        self._threads = ThreadPoolExecutor(min(_MAX_WORKERS, num_cores))
        self._workers: dict[int, _Worker] = {}  # by the thread that asks it

    def submit(self, attempt: Attempt) -> Future[list[float | str]]:
        """Begin to compute the rewards of an answer.

        Returns:
            Its future rewards, in the order of the names; for one that failed, the reason. A stop leaves out
            those that were not computed by then.
        """
        return self._threads.submit(self._score, attempt)

    def close(self) -> None:
        """End all processes. What was not computed by then is not computed."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers.values():
            worker.end()

    def _score(self, attempt: Attempt) -> list[float | str]:
        thread = threading.get_ident()
        found: list[float | str] = []
        for k in range(len(self._names)):
            if self._is_stopping():
                break
            try:
                if thread not in self._workers:
                    self._workers[thread] = _Worker(self._names, self._is_stopping)
                found.append(self._workers[thread].ask((k, attempt), self._timeout))
                continue
            except TimeoutError:
                why = f"took more than {self._timeout:g} s"
            except (OSError, EOFError):
                why = "ended its process"
            if thread in self._workers:
                self._workers.pop(thread).end()
            if not self._is_stopping():
                found.append(f"{why} (row {attempt.origin})")
        return found


class _Worker:
    """A process that computes rewards. Whatever they start ends with it."""

    def __init__(self, names: tuple[str, ...], is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._connection, theirs = Pipe()
        code = f"import sys; sys.path = {sys.path!r}; from kit.scoring.rewards import serve; serve({theirs.fileno()})"
        # Not a fork, which would have the run's threads and its GPU.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            self.ask(names, _START_SECONDS)
        except (OSError, EOFError):
            self.end()
            raise

    def ask(self, content: Any, seconds: float) -> Any:
        """Return the answer to ``content``: names of rewards, or the number of one among them and an attempt.

        Raises:
            TimeoutError: it took too long, or the run stops.
            OSError, EOFError: the process ended.
        """
        end = time.monotonic() + seconds
        self._connection.send(content)
        while not self._connection.poll(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end or self._is_stopping():
                raise TimeoutError
        return json.loads(self._connection.recv_bytes())

    def end(self) -> None:
        """End the process and those that it started."""
        self._connection.close()
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_START_SECONDS)


def serve(number: int) -> None:
    """Compute rewards in a child of this process until the one that asks closes standard input, or ends.

    Then this process ends all its children, and so those of its children, which become its own.

    Args:
        number: of this end of the connection.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if not child:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _answer(Connection(number))
        os._exit(0)
    os.close(number)
    os.read(0, 1)
    with contextlib.suppress(OSError):  # where there is no /proc
        os.killpg(child, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(OSError):
                for pid in children.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


def _answer(connection: Connection) -> None:
    """Answer each question in turn. The first one is which rewards there are."""
    own = os.getpid()
    names = connection.recv()
    for name in filter(own_metric.is_own, names):
        own_metric.load(name)
    answer: float | str = ""
    with contextlib.suppress(EOFError):
        while os.getpid() == own:  # else a reward forked
            connection.send_bytes(json.dumps(answer).encode())
            k, attempt = connection.recv()
            answer = _number_or_why(names[k], attempt)


def _number_or_why(name: str, attempt: Attempt) -> float | str:
    try:
        return reward(name, attempt)
    except own_metric.MetricError as error:
        (problem,) = error.problems
        return f"{problem.where}: {problem.found}"
    except Exception as error:  # of a library, given any text
        return f"{own_metric.key_of(name)}: {type(error).__name__}: {str(error)[:300]} (row {attempt.origin})"
