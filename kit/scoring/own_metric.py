"""A metric or reward function of the user: ``--metrics FILE.py:FUNCTION``, with ``function(expected, answer, row)``.

It may also have parameters named ``completion``, the messages after the prompt, and ``environment``, the object of
``--environment``. One that begins with another of these parameters than ``expected`` gets them by name, and needs no
reference answer.

Promises: the file runs only if the command line names it. An error in it is a ``Problem`` at the user's own line. The
function gets a copy of the row, so what it changes there has no effect.
"""

import copy
import importlib.util
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Annotated, Any, TypeGuard, cast

from pydantic import Field

from kit.system.errors import LateError, Problem, UserError, first_line

Function = Callable[[str, str, Any], Any]
SIGNATURE = "function(expected, answer, row) -> float, optionally with completion and environment; or without expected"
_NAMED = ("answer", "row", "completion", "environment")
PATTERN = r".+\.py:[A-Za-z_]\w*"  # of a name in ``metrics``
OwnMetric = Annotated[str, Field(pattern=f"^{PATTERN}$")]  # code: only the command line may name it


class MetricError(LateError):
    """The function of the user raised an error, or returned no number."""


def is_own(name: str) -> bool:
    """Return whether one of ``metrics`` names a function of the user: ``FILE.py:FUNCTION``."""
    return ".py:" in name


def key_of(name: str) -> str:
    """Return the name of a metric or a reward in results: of ``FILE.py:FUNCTION`` the function's, else the kind."""
    return name.rpartition(":")[2] if is_own(name) else name.partition(":")[0]


@cache
def load(name: str) -> Function:
    """Return the function of ``FILE.py:FUNCTION``.

    Raises:
        UserError: see ``find``; or the function has other parameters.
    """
    function = find(name, SIGNATURE)
    path, _, function_name = name.rpartition(":")
    _check_parameters(os.path.expanduser(path), function_name, function)
    return function


def find(name: str, expected: str) -> Callable[..., Any]:
    """Run the file of ``FILE.py:NAME``, once in a process, and return what has the name there.

    Args:
        expected: what it should be, for the message.

    Raises:
        UserError: there is no such file or name, or the file cannot be imported.
    """
    path, _, attribute = name.rpartition(":")
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise UserError(name, f"there is no file {path!r}", "FILE.py:FUNCTION", "a relative path counts from here")
    if not callable(found := getattr(_imported(path), attribute, None)):
        raise UserError(name, f"{path} has no function {attribute!r}", expected)
    return cast(Callable[..., Any], found)


def extras(name: str) -> list[str]:
    """Return which of ``completion`` and ``environment`` the function takes."""
    return _extras(inspect.signature(load(name)))


def takes_expected(name: str) -> bool:
    """Return whether the function compares with the reference answer."""
    return not _is_named(inspect.signature(load(name)))


def _is_named(signature: inspect.Signature) -> bool:
    """Whether a function gets its arguments by name."""
    return next(iter(signature.parameters), "") in _NAMED and "expected" not in signature.parameters


def _arguments(signature: inspect.Signature, expected: Any, given: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call; ``given``: the values of ``_NAMED``. Raises ``TypeError``."""
    if _is_named(signature):
        return signature.bind(**{key: given[key] for key in _NAMED if key in signature.parameters})
    return signature.bind(expected, given["answer"], given["row"], **{key: given[key] for key in _extras(signature)})


def _extras(signature: inspect.Signature) -> list[str]:
    return [name for name in ("completion", "environment") if name in signature.parameters]


def score(
    name: str,
    expected: str | None,
    answer: str,
    row: Any,
    origin: str,
    completion: Sequence[dict[str, Any]] = (),
    environment: Any = None,
) -> float:
    """Return what the function gives for one answer.

    Args:
        expected: None, if the row has no reference answer.
        row: of the dataset, unchanged.
        origin: the row's place, for the message: ``eval.jsonl:17``.
        completion: the messages after the prompt; none: the answer alone.

    Raises:
        MetricError: it raises an error, or returns something else than a finite number.
    """
    path, _, function_name = name.rpartition(":")
    path = os.path.expanduser(path)
    function = load(name)
    messages = completion or [{"role": "assistant", "content": answer}]
    given = {"answer": answer, "row": copy.deepcopy(row), "completion": messages, "environment": environment}
    try:
        made = _arguments(inspect.signature(function), expected, given)
        value = function(*made.args, **made.kwargs)
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {first_line(error)[:200]} (row {origin}, answer {repr(answer)[:60]})"
        raise MetricError(
            Problem(_line_of(error, path), found, fix=f"correct {function_name}, or catch it there")
        ) from None
    if is_number(value):
        return float(value)
    found = f"{function_name} returned {repr(value)[:60]} (row {origin}, answer {repr(answer)[:60]})"
    fix = "return float(...), such as 0.0 for an answer without a value"
    raise MetricError(Problem(definition(path, function), found, "a finite number", fix))


def is_number(value: Any) -> TypeGuard[numbers.Real]:
    """Return whether it is a finite number; not a tensor, and not a string of digits: nothing is guessed."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


@cache
def _imported(path: str) -> ModuleType:
    """The module of a file, whose folder is where it finds its own imports."""
    name = f"kit_metric_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that none of its files hides a library
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else _line_of(error, path)
        fix = f"`{os.path.basename(sys.executable)} {path}` shows the whole error"
        found = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            fix = f"install {error.name.partition('.')[0]} into this environment"
        raise UserError(where, found, "a file that can be imported", fix) from None
    return module


def _check_parameters(path: str, name: str, function: Any) -> None:
    """Raise ``UserError`` if ``function`` cannot be called as ``SIGNATURE``, or takes its texts the other way round."""
    where, fix = definition(path, function), f"def {name}(expected, answer, row):"
    try:
        signature = inspect.signature(function)
        _arguments(signature, "", dict.fromkeys(_NAMED))
    except (TypeError, ValueError) as error:
        raise UserError(where, first_line(error), SIGNATURE, fix) from None
    names = list(signature.parameters)
    if {"expected", "answer"} <= set(names) and names.index("answer") < names.index("expected"):
        raise UserError(where, "answer before expected", SIGNATURE, fix)


def definition(path: str, function: Any) -> str:
    """Return ``file:line`` of a function of the user's file."""
    code = getattr(function, "__code__", None)
    return f"{path}:{code.co_firstlineno}" if code else path


def _line_of(error: BaseException, path: str) -> str:
    """``file:line`` of the last line of the user's file that took part in ``error``."""
    own = os.path.realpath(path)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.realpath(frame.filename) == own]
    return f"{path}:{lines[-1]}" if lines else path
