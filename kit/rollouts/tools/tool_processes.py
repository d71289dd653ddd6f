"""Tools and environments: functions and classes of the user, called in processes of their own.

Promises: each trajectory has a process, with random generators seeded by the trajectory. A call that raises an error,
hangs, or ends its process gives a message for the model, and the run continues. What a process started ends with it.
"""

import gc
import inspect
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy.random  # here, so that sessions share it
from pydantic import ValidationError, validate_call

from kit.scoring.own_metric import definition, extras, find, is_own, key_of, load
from kit.scoring.rewards import Attempt, number_or_why
from kit.scoring.workers import START_SECONDS, Worker, answer_each, result_of, serve, start_worker
from kit.system.errors import Problem, Problems, UserError, first_line, listed, raise_if

_MAX_CHARACTERS = 65_536  # of a result
_CLOSE_SECONDS = 2.0  # for ``close`` of an environment
_NOT_TOOLS = ("reset", "get_reward", "close")  # methods of an environment that the model does not see
_FUNCTION = "a function with type hints, and a docstring that describes each argument under `Args:`"
_CLASS = "a class with reset(self, **row), and get_reward(self) for the reward `environment`"
_PATH = re.compile(r"(?<![\w:/.])/[^\s'\"/]+/[^\s'\",;:)\]]+")


class ToolFailure(Exception):
    """Why there is no result, in words for the model. After a stop its words mean nothing."""


class ToolHost:
    """Opens the processes of trajectories: forks of one that has imported the user's files."""

    def __init__(
        self,
        tools: Sequence[str],
        environment: str | None,
        rewards: Sequence[str],
        timeout: float,
        is_stopping: Callable[[], bool] = lambda: False,
        schemas: Sequence[dict[str, Any]] = (),
    ) -> None:
        """
        Args:
            tools: ``FILE.py:FUNCTION``.
            environment: ``FILE.py:CLASS``.
            rewards: the names of all rewards.
            timeout: of a call, in seconds.
            is_stopping: whether the run was asked to stop, and so does not wait for calls.
            schemas: what ``schemas`` returns, if that is known: a process takes seconds to make them.
        """
        self._names = (tuple(tools), environment, tuple(rewards))
        self._code = [*tools, *([environment] if environment else []), *filter(is_own, rewards)]
        self.has_environment, self.timeout = environment is not None, timeout
        self._is_closed = False
        self._is_stopping = lambda: self._is_closed or is_stopping()
        self._zygote: Worker | None = None
        self._lock = threading.RLock()
        self._schemas = list(schemas)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, by transformers' ``get_json_schema``: functions, then public methods.

        Raises:
            UserError: a file, function or class cannot be used.
        """
        with self._lock:
            if not self._schemas:
                try:
                    worker = self.fork()
                    self._schemas = _result(worker, ("schemas",), START_SECONDS)
                    worker.end()
                except (OSError, EOFError, ValueError, ToolFailure) as error:
                    if self._is_stopping():
                        raise ToolFailure("the run stops") from None
                    files = ", ".join({each.rpartition(":")[0] for each in self._code})
                    why = str(error) or "it hung, or ended its process"
                    raise UserError("--tools", f"{files}: {why}", fix="`python FILE` shows the whole error") from None
        return self._schemas

    def open(self, seed: Sequence[int], row: Mapping[str, Any] | None) -> "ToolSession":
        """Return a session, whose process starts with its first call.

        Args:
            seed: of the random generators.
            row: of the dataset, for ``reset``.
        """
        return ToolSession(self, seed, row)

    def fork(self) -> Worker:
        """Return a new process. Raises ``UserError`` as ``schemas`` does, and as ``Worker.ask``."""
        with self._lock:
            if self._is_stopping():
                raise TimeoutError
            try:
                if not self._zygote:
                    # With one thread, as a process with threads of OpenMP can compute nothing after a fork.
                    start = partial(start_worker, fork_each, OMP_NUM_THREADS="1")
                    self._zygote = Worker(start, self._is_stopping)
                    _result(self._zygote, self._names, START_SECONDS)
                connection = self._zygote.connection
                return Worker(lambda theirs: send_handle(connection, theirs.fileno(), 0), self._is_stopping)
            except BaseException:  # also if it was killed: the next session starts another
                self._end()
                raise

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._zygote:
            self._zygote.end()
            self._zygote = None


class ToolSession:
    """The tools of one trajectory, and its environment."""

    def __init__(self, host: ToolHost, seed: Sequence[int], row: Mapping[str, Any] | None) -> None:
        """See ``ToolHost.open``."""
        self._host, self._seed, self._row = host, list(seed), row
        self._worker: Worker | None = None
        self._num_workers = 0
        self._lost = ""  # why there is no environment any more

    def start(self) -> str:
        """Make the environment, and return its first observation; an empty string if there is none.

        Raises:
            ToolFailure: the constructor or ``reset`` fails. Then each call fails as well.
        """
        if not self._host.has_environment:
            return ""
        try:
            return str(self._ask("environment", self._host.timeout, "start", self._row))
        except ToolFailure as failure:
            self._end()
            self._lost = str(failure)
            raise

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool: a string as it is, another value as JSON.

        Arguments are converted to the types of the function by pydantic: calls in XML have only text.

        Raises:
            ToolFailure: there is none.
        """
        names = [each["function"]["name"] for each in self._host.schemas()]
        if name not in names:
            raise ToolFailure(f"there is no tool {name[:60]!r}, only {listed(names, 20)}")
        if self._lost:
            raise ToolFailure(self._lost)
        return str(self._ask(name, self._host.timeout, "call", name, arguments))

    def reward(self, name: str, timeout: float, attempt: Attempt) -> float | str:
        """Return a reward of the trajectory, or the reason why it failed. See ``kit.scoring.rewards.reward``."""
        try:
            found: float | str = self._ask(key_of(name), timeout, "reward", name, attempt)
        except ToolFailure as failure:
            return f"{failure} (row {attempt.origin})"
        return found

    def close(self) -> None:
        """Call ``close`` of the environment, if it has that method, and end the process."""
        if self._worker and self._host.has_environment and not self._lost:
            with suppress(ToolFailure):
                self._ask("close", _CLOSE_SECONDS, "close")
        self._end()

    def _ask(self, what: str, seconds: float, *question: Any) -> Any:
        try:
            if not self._worker:
                self._worker = self._host.fork()
                self._num_workers += 1
                # With time of its own: the processes of many trajectories start together.
                seed = str([*self._seed, self._num_workers])
                _result(self._worker, ("begin", seed, self._lost), START_SECONDS)
            return _result(self._worker, question, seconds)
        except TimeoutError:
            why = f"{what} took more than {seconds:g} s"
        except (OSError, EOFError, ValueError):
            why = f"{what} ended its process"
        except ToolFailure as failure:
            raise ToolFailure(f"{what}: {failure}") from None
        except KeyboardInterrupt:  # in a chat: what still comes is no answer to the next question
            self._end()
            self._lost = "the environment ended: interrupted" * self._host.has_environment
            raise
        self._end()
        if self._host.has_environment:
            self._lost = self._lost or f"the environment ended: {why}"
        raise ToolFailure(why)

    def _end(self) -> None:
        if self._worker:
            self._worker.end()
            self._worker = None


def _result(worker: Worker, question: Any, seconds: float) -> Any:
    """The answer of ``_reply``. Raises what it reports, and as ``Worker.ask``."""
    done, value = worker.ask(question, seconds)
    if done:
        return value
    if isinstance(value, list):
        raise UserError(*(Problem(*each) for each in value))
    raise ToolFailure(value)


class _Session:
    """The user's code, in the process of a session: each public method answers a question of ``ToolSession``."""

    def __init__(self, tools: Sequence[str], environment: str | None, rewards: Sequence[str]) -> None:
        """Import the files. Raises ``UserError``."""
        found = [(name.rpartition(":")[0], key_of(name), find(name, _FUNCTION)) for name in tools]
        self._functions = {key: function for _, key, function in found}
        if environment:
            self._factory = factory = find(environment, _CLASS)
            owner = factory if isinstance(factory, type) else type(factory())
            methods, path = dict(inspect.getmembers(owner, inspect.isfunction)), environment.rpartition(":")[0]
            wanted = ["reset", *["get_reward"] * ("environment" in rewards)]
            raise_if(Problem(environment, f"no method {name}", _CLASS) for name in wanted if name not in methods)
            found += [(path, key, each) for key, each in methods.items() if key[0] != "_" and key not in _NOT_TOOLS]
            if not found:
                raise UserError(environment, "no public method, so no tool", "methods for the model to call")
        self._tools = found
        self._environment: Any = None
        self._lost = ""
        for name in filter(is_own, rewards):
            load(name)
        if "math" in rewards:
            import math_verify  # noqa: F401

    def schemas(self) -> list[dict[str, Any]]:
        from transformers.utils import get_json_schema

        found, problems = [], Problems()
        for path, name, function in self._tools:
            try:
                kinds = {each.kind for each in inspect.signature(function).parameters.values()}
                if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                    raise TypeError("* and ** have no JSON schema")
                found.append(get_json_schema(function))
                found[-1]["function"]["name"] = name
            except Exception as error:  # whatever a type hint raises
                problems.append(Problem(definition(path, function), f"{name}: {first_line(error)}", _FUNCTION))
        names = [each["function"]["name"] for each in found]
        problems += [
            Problem("--tools", f"{name} is twice", "each name once") for name in names if names.count(name) > 1
        ]
        problems.raise_if_any()
        return found

    def begin(self, seed: str, lost: str) -> None:
        self._lost = lost
        random.seed(seed)
        numpy.random.seed(random.getrandbits(32))

    def start(self, row: Mapping[str, Any] | None) -> str:
        self._environment = environment = self._factory()
        parameters = inspect.signature(environment.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        given = {key: value for key, value in (row or {}).items() if takes_all or key in parameters}
        observation = result_of(environment.reset(**given))
        if not isinstance(observation, str | None):
            raise ToolFailure(f"reset returned {type(observation).__name__}, no text")
        return _text(observation or "")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        function = self._functions.get(name) or getattr(self._environment, name)
        fitting = validate_call(config={"arbitrary_types_allowed": True, "coerce_numbers_to_str": True})(function)
        try:
            return _text(result_of(fitting(**arguments)))
        except ValidationError as error:
            wrong = [f"argument {each['loc'][0]}: {each['msg']}" for each in error.errors() if each["loc"]]
            raise ToolFailure("; ".join(wrong) or first_line(error)) from None

    def reward(self, name: str, attempt: Attempt) -> float | str:
        if self._lost and (name == "environment" or (is_own(name) and "environment" in extras(name))):
            raise ToolFailure(self._lost)
        return number_or_why(name, attempt, self._environment)

    def close(self) -> None:
        result_of(getattr(self._environment, "close", lambda: None)())


def fork_each(connection: Connection) -> None:
    """Import the files that are named first; then fork a session's process for each connection that is sent."""
    found: list[_Session] = []
    names = connection.recv()
    connection.send_bytes(json.dumps(_reply(lambda: found.append(_Session(*names)))).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nothing is left of a process that ended
    gc.collect()
    gc.freeze()  # a collection writes to its memory, which sessions share
    with suppress(EOFError):
        while True:
            number = recv_handle(connection)
            with suppress(OSError):  # no process is left: the session finds its connection closed
                if not os.fork():
                    try:
                        os.set_inheritable(number, False)
                        connection.close()
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        serve(
                            lambda own: answer_each(own, lambda ask: _reply(getattr(found[0], ask[0]), *ask[1:])),
                            number,
                        )
                    finally:
                        os._exit(0)
            os.close(number)


def _reply(function: Callable[..., Any], *given: Any) -> tuple[bool, Any]:
    """Whether ``function`` returned, and what; else its problems, or a message for the model."""
    try:
        return True, function(*given)
    except UserError as error:
        return False, [astuple(each) for each in error.problems]
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        line = _PATH.sub(lambda found: os.path.basename(found[0]), first_line(error))[:300]
        return False, line if isinstance(error, ToolFailure) else f"{type(error).__name__}: {line}"


def _text(value: Any) -> str:
    """A result as text for the model. Raises ``ToolFailure``."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise ToolFailure(f"returned {type(value).__name__}, which is no JSON") from None
    if len(text) > _MAX_CHARACTERS:
        raise ToolFailure(f"returned {len(text):,} characters, above {_MAX_CHARACTERS:,}")
    return text
