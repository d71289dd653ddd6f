"""Types the fixes that messages print, and holds that each works on the input that it was printed for.

A *site* is a call in ``kit/`` or ``recipes/`` that makes a fix: ``Problem(where, found, expected, fix)``, a
``Conflict``, or any other call with ``fix=``. Its name is ``file:function``; ``#2`` is the second one in that function,
in the order of the source. Each site has a ``@case`` in a file ``cases_*.py``, or stands in its table ``UNTYPED`` with
the reason.

A case makes the situation, and returns the command that a user types, such as ``finetune --dataset my.jsonl``. The
command runs in this process, in an empty folder with ``model`` and ``chats.jsonl``, until weights would be loaded.
Then each way that the fix offers is typed, and none may lead to the same problem, or to a new one.
"""

import ast
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers import ROOT

import kit.config.conflicts
import kit.errors
from kit.config.fields import is_switch
from kit.config.scripts import COMMANDS
from kit.config.validation import FLAGS
from kit.data.read.text import Ending
from kit.errors import Problem, UserError

ARGUMENT = {"Problem": 3, "Conflict": 2}  # of these, the number of the argument that is the fix


# --- sites


@dataclass(frozen=True)
class Site:
    """A call that makes a fix."""

    name: str  # file:function, with #2 for the second one in the function
    path: str
    lines: range
    fix: str  # the expression


@cache
def all_sites() -> dict[str, Site]:
    """All calls that make a fix, by name."""
    sites: dict[str, Site] = {}
    for path in sorted([*ROOT.glob("kit/**/*.py"), *ROOT.glob("recipes/*.py")]):
        name = str(path.relative_to(ROOT))
        calls = _calls(ast.parse(path.read_text()), "")
        functions = [function for function, _, _ in calls]
        for i, (function, call, fix) in enumerate(calls):
            number = f"#{functions[: i + 1].count(function)}" if functions.count(function) > 1 else ""
            lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
            sites[f"{name}:{function}{number}"] = Site(f"{name}:{function}{number}", name, lines, ast.unparse(fix))
    return sites


def _calls(node: ast.AST, function: str) -> list[tuple[str, ast.Call, ast.expr]]:
    found = []
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".strip(".")
        if isinstance(child, ast.Call) and (fix := _fix_of(child)):
            found.append((function, child, fix))
        found += _calls(child, inner)
    return found


def _fix_of(call: ast.Call) -> ast.expr | None:
    """The argument of a call that is a fix; None if it has none, or only passes on that of another object."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    at = ARGUMENT.get(name, sys.maxsize)
    fix = next(
        (word.value for word in call.keywords if word.arg == "fix"), call.args[at] if len(call.args) > at else None
    )
    is_passed_on = isinstance(fix, ast.Attribute) and fix.attr == "fix"
    return None if is_passed_on or (isinstance(fix, ast.Constant) and fix.value == "") else fix


# --- the place in which a case happens


class Started(BaseException):
    """Raised where weights would be loaded: the command has no problem."""


@dataclass
class World:
    """A folder of its own, with ``model`` and ``chats.jsonl``."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    made: list[tuple[str, set[str]]] = field(default_factory=list)  # each fix, and the sites that made it
    kept: list[object] = field(default_factory=list)  # what lives as long as the case, such as an open file

    def write(self, name: str, *lines: str) -> Path:
        """Write a file of these lines."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def run(self, command: str) -> list[Problem]:
        """Run ``finetune``, ``score``, ``export`` or ``kit`` with its words, and return the problems it reports."""
        words = shlex.split(command)
        name = words.pop(0)
        if name == "finetune" and not any(re.match("--(model_name_or_path|recipe)", word) for word in words):
            words = ["--model_name_or_path=model", "--max_length=256", *words]
        if name == "finetune" and not any(re.match(r"--(dataset|recipe)|(?!--).*\.jsonl", word) for word in words):
            words += ["--dataset=chats.jsonl"]
        try:
            with self._watched():
                if name == "kit":
                    _run_kit(words)
                else:
                    script = str(ROOT / "recipes" / f"{name}.py")
                    with patch.object(sys, "argv", [script, *words]):
                        runpy.run_path(script)["main"]()
        except UserError as error:
            return error.problems
        except Started:
            pass
        except SystemExit as end:  # of --help
            assert not end.code, command
        return []

    @contextmanager
    def _watched(self):
        def started(*_, **__):
            raise Started

        def recording(original):
            def init(self_, *args, **kwargs):
                original(self_, *args, **kwargs)
                if self_.fix:
                    self.made.append((self_.fix, _sites_of(sys._getframe(1))))

            return init

        with (
            patch.dict(os.environ),
            patch("os.execve", started),
            patch("kit.strategy.accelerator.start", started),
            patch.object(Problem, "__init__", recording(Problem.__init__)),
            patch.object(Ending, "__init__", recording(Ending.__init__)),
            patch.object(kit.config.conflicts.Conflict, "__init__", recording(kit.config.conflicts.Conflict.__init__)),
        ):
            yield

    def sites(self, problem: Problem) -> set[str]:
        """The sites that made the fix of ``problem``, or the part of it that one of several made."""
        return {site for fix, sites in self.made if fix in problem.fix for site in sites}


def _run_kit(words: list[str]) -> None:
    from kit.cli import main as front

    errors: list[BaseException | None] = []
    with patch.object(front, "show_error", lambda text: errors.append(sys.exc_info()[1])):
        front.main(words)
    for error in errors:
        if error:
            raise error


def _sites_of(frame) -> set[str]:
    found = set()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)):
            name, line = os.path.relpath(path, ROOT), frame.f_lineno
            found |= {site.name for site in all_sites().values() if site.path == name and line in site.lines}
        frame = frame.f_back
    return found


# --- how a fix is typed


def ways(fix: str) -> list[str]:
    """Split a fix into the ways that it offers: at ``; or``, and at ``or`` before a flag or a command."""
    parts, quote, start = [], "", 0
    for i, char in enumerate(fix):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (i == 0 or fix[i - 1] in " =[({,"):
            quote = char
        elif match := re.compile(r"(;|,? or(?= (--|`|use --|did you)))( or)? ").match(fix, i):
            parts.append(fix[start:i])
            start = match.end()
    return [part.strip() for part in [*parts, fix[start:]] if part.strip()]


def flags_in(text: str) -> list[tuple[str, str | None]]:
    """The flags that a text names, each with its value as the shell reads it; None if it has none."""
    found = []
    for match in re.finditer(r"(?<![\w'\"-])--([a-z]\w*)(?:[= ](?!--)((?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"])+))?", text):
        name, word = match[1], match[2]
        plain = word is not None and not re.search(r"['\"]", word)
        value = (
            shlex.split(word.rstrip(",:;.)") if plain else re.sub(r"(['\"])[,:;.)]+$", r"\1", word))[0]
            if word
            else None
        )
        if name in FLAGS and is_switch(FLAGS[name]) and value not in ("true", "false"):
            value = None
        found.append((name, value))
    return found


def says_what_to_type(way: str) -> bool:
    """Whether a way names a flag, a command, or a word to put right."""
    return bool(flags_in(way) or re.search(r"`(kit|accelerate|python) |did you mean|leave it out|^use \w+$", way))


def typed(problem: Problem, way: str, command: str, values: dict[str, str]) -> str:
    """Return ``command`` as it is after a user did what ``way`` says.

    Args:
        values: what the user puts for a word in capitals, such as ``{"FILE": "my.jsonl"}``.
    """
    words = shlex.split(command)
    if match := re.search(r"`(kit [^`]*|accelerate launch [^`]*|python [^`]*)`", way):
        return as_command(match[1])
    flag = problem.where.partition(" ")[0].removeprefix("--")
    if match := re.search(r"did you mean '?([^' ]+)'?\?", way):
        if problem.where.startswith("kit "):
            return shlex.join(["kit", match[1], *words[2:]])
        if problem.found.startswith("unknown") or "without a flag" in problem.found:
            return shlex.join(re.sub(rf"^(--)?{re.escape(flag)}\b", f"--{match[1]}", word) for word in words)
        return with_flag(words, flag, match[1])
    if "without a flag" in problem.found:
        for stray in shlex.split(problem.where):
            words.remove(stray)
    if match := re.match(r"use (\w+)$", way):  # the same setting by its name here
        return shlex.join(re.sub(rf"^--{re.escape(flag)}\b", f"--{match[1]}", word) for word in words)
    if match := re.search(r" instead of --(\w+)", way):
        words, way = without_flag(words, match[1]), way[: match.start()]
    flags = flags_in(way)
    assert flags or "leave it out" in way, f"this fix names nothing to type: give the case an `edit`\n    {way}"
    if "leave it out" in way or "leave out" in way:
        for name in {flag, *(name for name, _ in flags)} & set(FLAGS):
            words = without_flag(words, name)
        return shlex.join(words)
    for name, value in flags:
        assert value is not None or name not in FLAGS or is_switch(FLAGS[name]), f"--{name} without a value: {way}"
        words = shlex.split(with_flag(words, name, values.get(value or "", value)))
    return shlex.join(words)


def as_command(text: str) -> str:
    """Return a command of a message in the form that ``World.run`` takes."""
    words = shlex.split(text)
    if words[0] == "kit" and words[1] in COMMANDS:
        return shlex.join([Path(COMMANDS[words[1]]).stem, *words[2:]])
    script = next((i for i, word in enumerate(words) if word.endswith(("finetune.py", "score.py", "export.py"))), None)
    return text if script is None else shlex.join([Path(words[script]).stem, *words[script + 1 :]])


def without_flag(words: list[str], name: str) -> list[str]:
    """Return the words without a flag and its value."""
    kept: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word.partition("=")[0] != f"--{name}":
            kept.append(word)
        elif "=" not in word and words and not words[0].startswith("--"):
            words.pop(0)
    return kept


def with_flag(words: list[str], name: str, value: str | None) -> str:
    """Return the command with this value for a flag, instead of the one that it has."""
    return shlex.join([*without_flag(words, name), f"--{name}" if value is None else f"--{name}={value}"])


# --- cases

Edit = Callable[[World, Problem, str], str]


@dataclass(frozen=True)
class Case:
    """A situation, and how its fix is typed."""

    site: str
    make: Callable[[World], str]
    says: str  # which part of the site's text is tried, as a pattern
    then: str  # the only problem that may follow, as a pattern; empty: none may
    values: dict[str, str]
    edit: Edit | None

    def try_fix(self, world: World) -> None:
        """Fail unless this case's site prints its fix, and each way of it works when typed."""
        command = self.make(world)
        first = world.run(command)
        text = "\n".join(map(str, first)) or "no problem"
        mine = [each for each in first if self.site in world.sites(each) and re.search(self.says, str(each))]
        others = sorted(set().union(*map(world.sites, first)))
        assert mine, f"{self.site} (of {others}) did not print a fix with {self.says!r} for\n    {command}\nbut\n{text}"
        problem = mine[0]
        offered = ways(problem.fix)
        # Beside a way that is typed there may be one to do elsewhere, such as to wait.
        offered = [way for way in offered if says_what_to_type(way)] or offered
        for way in [problem.fix] if self.edit else offered:
            now = self.edit(world, problem, command) if self.edit else typed(problem, way, command, self.values)
            left = [each for each in world.run(now) if str(each) not in map(str, first) or each == problem]
            bad = [each for each in left if each == problem or not (self.then and re.search(self.then, str(each)))]
            assert not bad, "\n".join(["", command, text, f"typed: {way}", now, *map(str, bad)])


CASES: list[Case] = []


def case(
    site: str, says: str = "", then: str = "", values: dict[str, str] | None = None, edit: Edit | None = None
) -> Callable[[Callable[[World], str]], Callable[[World], str]]:
    """Register a case. The function makes the situation and returns the command.

    Args:
        site: the name of the site that prints the fix.
        says: a pattern of the problem, where one site prints several.
        then: a pattern of the problem that may follow when the fix is typed, such as one of an unrelated setting.
        values: what is typed for words in capitals.
        edit: does what the fix says, where it says more than flags, and returns the command to run then.
    """

    def register(make: Callable[[World], str]) -> Callable[[World], str]:
        CASES.append(Case(site, make, says, then, values or {}, edit))
        return make

    return register


def again(world: World, problem: Problem, command: str) -> str:
    """An ``edit`` for a case that changed the files itself."""
    return command
