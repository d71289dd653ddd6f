"""Reward functions: rules, or a function of the user.

Promises: they run in separate processes, so that one which hangs, exits, prints or starts processes costs the run
nothing but its time. A failed reward is a line that says why.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kit.scoring import own_metric
from kit.scoring.metrics import BLEU, METRICS, TOOL_CALLS, Metric
from kit.scoring.workers import START_SECONDS, Worker, answer_each, result_of, start_worker

_MAX_WORKERS = 8  # processes that compute rewards, each called by a thread

_DELIMITERS = re.compile(r"(?<!\\)\$|\\boxed|\\[(\[]")
_COMMAND = re.compile(r"\\[A-Za-z]+(\{[^{}]*\})?")
_WORDS = re.compile(
    r"[A-Za-z]{4,}\b(?!\()|[A-Za-z]{2,}\s+[A-Za-z]{2,}|\b(?!ln|lg)[a-z]{2}\s+\d|\d\s+(?!ln|lg|log|pi|sin|cos|tan)[A-Za-z]{2,}"
)


class Attempt(NamedTuple):
    """A generated answer, and what its rewards need."""

    expected: str | None  # None: the row has no reference answer
    answer: str
    row: Any  # of the dataset; None if no reward of the user reads it
    origin: str  # ``train.jsonl:17``
    num_tokens: int  # of the answer
    max_new_tokens: int
    completion: Sequence[dict[str, Any]] = ()  # the messages after the prompt; none: the answer alone


def reward(name: str, attempt: Attempt, environment: Any = None) -> float:
    """Return one reward of an answer; raises as a function of the user does, see ``own_metric.score``.

    - ``environment``: what ``get_reward`` of the environment returns;
    - the names of ``kit.scoring.metrics.METRICS``, from 0 to 1;
    - ``math``: 1 if the answer is the expected one as mathematics, by math-verify;
    - ``json``: 1 if the answer is JSON;
    - ``regex:PATTERN``: 1 if the pattern is found in the answer;
    - ``overlong:N``: length penalty, 0 and down to -1 over the last N of ``max_new_tokens``:
      https://arxiv.org/abs/2503.14476, equation 13.
    """
    kind, _, value = name.partition(":")
    if kind == "environment":
        if not own_metric.is_number(value := result_of(environment.get_reward())):
            raise ValueError(f"get_reward returned {repr(value)[:60]}")
        return float(value)
    if own_metric.is_own(name):
        expected, answer, row, origin, *_, completion = attempt
        return own_metric.score(name, expected, answer, row, origin, completion, environment)
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
    if attempt.expected is None:
        raise ValueError("the row has no reference answer")
    if kind == "math":
        from math_verify import verify

        if not (wanted := read_math(attempt.expected)):
            raise ValueError(f"math-verify cannot read {attempt.expected[:60]!r}")
        return float(verify(wanted, read_math(attempt.answer)))
    return Metric(name).values(attempt.expected, attempt.answer, attempt.row, attempt.origin)[0]


def takes_expected(name: str) -> bool:
    """Return whether a reward or metric compares with the reference answer."""
    return own_metric.takes_expected(name) if own_metric.is_own(name) else name in (*METRICS, BLEU, TOOL_CALLS, "math")


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
        self._workers: dict[int, Worker] = {}  # by the thread that asks it

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
        for name in self._names:
            if self._is_stopping():
                break
            try:
                if thread not in self._workers:
                    worker = self._workers[thread] = Worker(partial(start_worker, answer_rewards), self._is_stopping)
                    worker.ask(self._names, START_SECONDS)
                found.append(self._workers[thread].ask((name, attempt), self._timeout))
                continue
            except TimeoutError:
                why = f"took more than {self._timeout:g} s"
            except (OSError, EOFError, ValueError):
                why = "ended its process"
            if thread in self._workers:
                self._workers.pop(thread).end()
            if not self._is_stopping():
                found.append(f"{why} (row {attempt.origin})")
        return found


def answer_rewards(connection: Connection) -> None:
    """Answer the names of rewards when their files are imported, then a name and an attempt with the reward."""
    for name in filter(own_metric.is_own, connection.recv()):
        own_metric.load(name)
    connection.send_bytes(b'""')
    answer_each(connection, lambda question: number_or_why(*question))


def number_or_why(name: str, attempt: Attempt, environment: Any = None) -> float | str:
    """Return one reward of an answer, as ``reward`` does, or why it failed."""
    try:
        return reward(name, attempt, environment)
    except own_metric.MetricError as error:
        (problem,) = error.problems
        return f"{problem.where}: {problem.found}"
    except Exception as error:  # of a library, given any text
        return f"{own_metric.key_of(name)}: {type(error).__name__}: {str(error)[:300]} (row {attempt.origin})"
