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
from contextlib import closing, suppress
from dataclasses import astuple
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

import numpy.random  # here, so that sessions share it
from pydantic import ValidationError, validate_call

from kit.scoring.own_metric import definition, extras, find, is_own, key_of, load
from kit.scoring.rewards import Attempt, number_or_why
from kit.scoring.workers import START_SECONDS, Worker, answer_each, result_of, serve, start_worker
from kit.system.errors import Problem, Problems, UserError, first_line, raise_if

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

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

    def __init__(self, recipe: "Recipe", is_stopping: Callable[[], bool] = lambda: False) -> None:
        """``is_stopping``: whether the run was asked to stop, and so does not wait for calls."""
        self.recipe = recipe
        self._is_closed = False
        self._is_stopping = lambda: self._is_closed or is_stopping()
        self._zygote: Worker | None = None
        self._lock = threading.Lock()

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, by transformers' ``get_json_schema``: functions, then public methods.

        Raises:
            UserError: a file, function or class cannot be used.
        """
        with closing(self.open((), None)) as session:
            try:
                found: list[dict[str, Any]] = session.ask("it", START_SECONDS, "schemas")
            except ToolFailure as failure:
                files = ", ".join({each.rpartition(":")[0] for each in chain.from_iterable(self.recipe.code.values())})
                raise UserError("--tools", f"{files}: {failure}", fix="`python FILE` shows the whole error") from None
        return found

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
            if not self._zygote:
                # With one thread, as a process with threads of OpenMP can compute nothing after a fork.
                zygote = Worker(partial(start_worker, fork_each, OMP_NUM_THREADS="1"), self._is_stopping)
                try:
                    _result(zygote, (self.recipe.tools, self.recipe.environment, self.recipe.rewards), START_SECONDS)
                except BaseException:
                    zygote.end()
                    raise
                self._zygote = zygote
            connection = self._zygote.connection
            try:
                return Worker(lambda theirs: send_handle(connection, theirs.fileno(), 0), self._is_stopping)
            except ConnectionError:  # it was killed: the next session starts another
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
        self._host, self._recipe, self._seed, self._row = host, host.recipe, seed, row
        self._worker: Worker | None = None
        self._num_workers = 0
        self._lost = ""  # why there is no environment any more

    def start(self) -> str:
        """Make the environment, and return its first observation; an empty string if there is none.

        Raises:
            ToolFailure: the constructor or ``reset`` fails. Then each call fails as well.
        """
        if not self._recipe.environment:
            return ""
        try:
            return str(self.ask("environment", self._recipe.tool_timeout, "start", self._row))
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
        if self._lost:
            raise ToolFailure(self._lost)
        return str(self.ask(name, self._recipe.tool_timeout, "call", name, arguments))

    def reward(self, name: str, timeout: float, attempt: Attempt) -> float | str:
        """Return a reward of the trajectory, or the reason why it failed. See ``kit.scoring.rewards.reward``."""
        try:
            found: float | str = self.ask(key_of(name), timeout, "reward", name, attempt, self._lost)
        except ToolFailure as failure:
            return f"{failure} (row {attempt.origin})"
        return found

    def close(self) -> None:
        """Call ``close`` of the environment, if it has that method, and end the process."""
        if self._worker and self._recipe.environment and not self._lost:
            with suppress(ToolFailure):
                self.ask("close", _CLOSE_SECONDS, "close")
        self._end()

    def ask(self, what: str, seconds: float, *question: Any) -> Any:
        """Return what a method of ``_Session`` does; ``question``: its name and arguments.

        Raises:
            ToolFailure: it raised an error, or gave no answer. The words begin with ``what``.
        """
        try:
            if not self._worker:
                self._worker = self._host.fork()
                self._num_workers += 1
                # With time of its own: the processes of many trajectories start together.
                seed = str([*self._seed, self._num_workers])
                _result(self._worker, ("begin", seed), START_SECONDS)
            return _result(self._worker, question, seconds)
        except TimeoutError:
            why = f"{what} took more than {seconds:g} s"
        except (OSError, EOFError, ValueError):
            why = f"{what} ended its process"
        except ToolFailure as failure:
            raise ToolFailure(f"{what}: {failure}") from None
        except KeyboardInterrupt:  # in a chat: what still comes is no answer to the next question
            self._end("interrupted")
            raise
        self._end(why)
        raise ToolFailure(why)

    def _end(self, why: str = "") -> None:
        if self._worker:
            self._worker.end()
            self._worker = None
        if why and self._recipe.environment:
            self._lost = self._lost or f"the environment ended: {why}"


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

    def begin(self, seed: str) -> None:
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

    def reward(self, name: str, attempt: Attempt, lost: str) -> float | str:
        if lost and (name == "environment" or (is_own(name) and "environment" in extras(name))):
            raise ToolFailure(lost)
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
