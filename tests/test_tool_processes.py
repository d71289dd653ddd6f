"""Tools and environments of the user, however they fail, give a result or a message, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Timer

import pytest
from helpers import ROOT

from kit.config.recipe import Recipe
from kit.rollouts.tools.tool_processes import ToolFailure, ToolHost
from kit.scoring import workers
from kit.scoring.rewards import Attempt
from kit.system.errors import UserError

pytestmark = pytest.mark.slow
OWN = '''
import asyncio, os, random, signal, sys, time
from typing import Literal, Optional

def add(
    a: int, b: float = 1.0, unit: Literal["m", "km"] = "m", more: Optional[list] = None, exact: bool = False
) -> str:
    """Add numbers.

    Args:
        a: The first.
        b: The second.
        unit: Of both.
        more: Others.
        exact: Whether to round.
    """
    return [a, b, unit, more, exact]

async def later(text: str) -> dict:
    """Wait, then say it.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0.01)
    return {"é": text}

def draw() -> float:
    """Draw a number."""
    return random.random()

def fail(how: str):
    """Fail.

    Args:
        how: In which way.
    """
    if how == "raises":
        raise ValueError("no such thing\\nnor another")
    if how == "opens":
        open(os.path.join(os.getcwd(), "none.txt"))
    if how == "waits":
        time.sleep(30)
    if how == "leaves":
        sys.exit("away")
    if how == "interrupts":
        raise KeyboardInterrupt
    if how == "ends":
        os._exit(3)
    if how == "closes":
        os.closerange(0, 256)
    if how == "recurses":
        return fail(how)
    if how == "allocates":
        return len(bytearray(1 << 50))
    if how == "hangs":
        open("hangs", "w").write(str(os.getpid()))
        time.sleep(600)
    if how == "writes":
        for number in range(3, 100):
            try:
                os.write(number, b"\\0\\0\\0\\x10no")
            except OSError:
                pass
        time.sleep(600)
    if how == "starts":
        os.system("setsid sleep 600 & echo $! >> started")
        return "started"
    if how == "forks":
        child = os.fork()
        return os.waitpid(child, 0)[1] if child else "child"
    if how == "prints":
        print("x" * 1_000_000)
    return {"bytes": b"x", "nan": [float("nan")], "surrogate": "\\ud800", "long": "x" * 10_000_000}.get(how)

def judge(expected, answer, row, environment, completion):
    return environment.count + len(completion) + row["id"] / 10

def plain(expected, answer, row):
    return 0.5 if answer == expected else 0.0

class Counter:
    def __init__(self):
        self.count = 0

    def reset(self, id, how="", **row):
        self.count = id
        if how:
            fail(how)
        return f"You start at {id} with {sorted(row)}."

    def increment(self, step: int) -> int:
        """Count up.

        Args:
            step: By how much; below 0 it hangs.
        """
        if step < 0:
            time.sleep(600)
        self.count += step
        return self.count

    @property
    def broken(self):
        raise RuntimeError

    def get_reward(self):
        return float(self.count) if self.count else None

    def close(self):
        open("closed", "a").write(f"{self.count} ")

    def _hidden(self):
        pass

class Narrow(Counter):
    def reset(self, id):
        self.count = id
'''


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The working folder of all tests, with the user's file."""
    path = tmp_path_factory.mktemp("tools")
    (path / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(workers, "_REST_SECONDS", 1)
        yield path


def settings(tools, environment=None, rewards=(), timeout=2.0):
    named = {"tools": tools, "environment": environment, "rewards": [*rewards], "tool_timeout": timeout}
    return Recipe(model_name_or_path="none", dataset="none", max_length=8, objective="grpo", **named)


def host_of(*tools, environment=None, rewards=(), timeout=2.0, **more):
    names = [f"own.py:{name}" for name in tools]
    return closing(ToolHost(settings(names, environment, rewards, timeout), **more))


@pytest.fixture(scope="module")
def functions(folder):
    with host_of("add", "later", "draw", "fail", rewards=["own.py:plain"]) as host:
        yield host


@pytest.fixture(scope="module")
def counters(folder):
    with host_of(environment="own.py:Counter", rewards=["environment", "own.py:judge", "own.py:plain"]) as host:
        yield host


def why(call, *given):
    with pytest.raises(ToolFailure) as caught:
        call(*given)
    return str(caught.value)


def wait_for_the_end_of(pid):
    status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


ATTEMPT = Attempt("yes", "yes", {"id": 2}, "train.jsonl:3", 1, 9, [{"role": "assistant"}, {"role": "tool"}])


def test_the_schemas_are_those_of_functions_and_public_methods(functions, counters):
    names = [each["function"]["name"] for each in functions.schemas()]
    assert names == ["add", "later", "draw", "fail"]
    (schema,) = counters.schemas()
    properties = schema["function"]["parameters"]["properties"]
    assert schema["function"]["name"] == "increment" and properties["step"]["type"] == "integer"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"a": 1, "b": 2}, '[1, 2.0, "m", null, false]'),
        ({"a": "1", "b": "2.5", "unit": "km", "more": [3], "exact": "True"}, '[1, 2.5, "km", [3], true]'),
        ({"a": 1, "more": None}, '[1, 1.0, "m", null, false]'),
        ({"a": "one"}, "add: argument a: Input should be a valid integer, unable to parse string as an integer"),
        ({"a": [1]}, "add: argument a: Input should be a valid integer"),
        ({"a": 1, "unit": "mile"}, "add: argument unit: Input should be 'm' or 'km'"),
        ({}, "add: argument a: Missing required argument"),
        ({"a": 1, "c": 1}, "add: argument c: Unexpected keyword argument"),
    ],
)
def test_arguments_fit_the_schema_or_are_named(functions, given, found):
    with closing(functions.open([0], None)) as session:
        assert session.start() == ""
        assert (session.call("add", given) if found[0] == "[" else why(session.call, "add", given)) == found


def test_results_are_text_or_json(functions):
    with closing(functions.open([0], None)) as session:
        assert session.call("later", {"text": 5}) == '{"é": "5"}'
        assert session.call("fail", {"how": "prints"}) == "null"
        assert session.reward("own.py:plain", 3.0, ATTEMPT) == 0.5


def test_random_numbers_depend_on_the_seed_alone(functions):
    def drawn(*seed):
        with closing(functions.open(seed, None)) as session:
            return [session.call("draw", {}) for _ in range(2)]

    assert drawn(1, 2) == drawn(1, 2) != drawn(1, 3)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("raises", "fail: ValueError: no such thing"),
        ("opens", "fail: FileNotFoundError: [Errno 2] No such file or directory: 'none.txt'"),
        ("leaves", "fail: SystemExit: away"),
        ("interrupts", "fail: KeyboardInterrupt: KeyboardInterrupt"),
        ("recurses", "fail: RecursionError: maximum recursion depth exceeded"),
        ("allocates", "fail: MemoryError: MemoryError"),
        ("bytes", "fail: returned bytes, which is no JSON"),
        ("nan", "fail: returned list, which is no JSON"),
        ("surrogate", "fail: returned str, which is no JSON"),
        ("long", "fail: returned 10,000,000 characters, above 65,536"),
        ("ends", "fail ended its process"),
        ("closes", "fail ended its process"),
        ("writes", "fail ended its process"),
        ("hangs", "fail took more than 2 s"),
    ],
)
def test_a_call_that_fails_is_a_message_and_the_next_one_works(functions, how, found):
    with closing(functions.open([0], None)) as session:
        assert why(session.call, "fail", {"how": how}).startswith(found)
        assert session.call("add", {"a": 1}) == '[1, 1.0, "m", null, false]'


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt; workers of pytest-xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_call_that_the_user_interrupts_answers_no_later_one(functions, counters, ctrl_c):
    with closing(functions.open([0], None)) as session, closing(counters.open([0], {"id": 4})) as other:
        other.start()
        assert functions.schemas() and counters.schemas()
        for name, ask in (("fail", session.call), ("increment", other.call)):
            Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                ask(name, {"how": "waits"} if name == "fail" else {"step": -1})
        assert session.call("add", {"a": 1}) == '[1, 1.0, "m", null, false]'
        assert why(other.call, "increment", {"step": 1}) == "the environment ended: interrupted"


def test_a_session_without_a_file_descriptor_fails_alone(functions, monkeypatch):
    with closing(functions.open([0], None)) as session, closing(functions.open([1], None)) as other:
        session.call("draw", {})
        with monkeypatch.context() as patch:
            patch.setattr(workers, "Pipe", lambda: os.open("none", os.O_RDONLY))  # an OSError
            assert why(other.call, "draw", {}) == "draw ended its process"
        assert session.call("add", {"a": 1}) == other.call("add", {"a": 1}) == '[1, 1.0, "m", null, false]'


def test_what_a_tool_started_ends_with_its_session(functions, folder):
    with closing(functions.open([0], None)) as session:
        assert session.call("fail", {"how": "forks"}) == "0"
        assert session.call("fail", {"how": "starts"}) == "started"
    wait_for_the_end_of((folder / "started").read_text().split()[-1])


def test_an_environment_keeps_its_state_and_gives_rewards(counters, folder):
    with closing(counters.open([0], {"id": 4, "prompt": "Go."})) as session:
        assert session.start() == "You start at 4 with ['prompt']."
        assert [session.call("increment", {"step": n}) for n in (1, "2")] == ["5", "7"]
        names = ("environment", "own.py:judge", "own.py:plain", "exact_match")
        assert [session.reward(name, 3.0, ATTEMPT) for name in names] == [7.0, 9.2, 0.5, 1.0]
    assert (folder / "closed").read_text().split()[-1] == "7"


def test_a_reset_gets_the_columns_that_it_names(folder):
    with host_of(environment="own.py:Narrow") as host, closing(host.open([0], {"id": 4, "prompt": "Go."})) as session:
        assert session.start() == "" and session.call("increment", {"step": 1}) == "5"


def test_an_environment_that_is_lost_fails_every_later_call(counters):
    with closing(counters.open([0], {"id": 4})) as session:
        session.start()
        assert why(session.call, "increment", {"step": -1}) == "increment took more than 2 s"
        lost = "the environment ended: increment took more than 2 s"
        assert why(session.call, "increment", {"step": 1}) == lost
        assert session.reward("environment", 3.0, ATTEMPT) == f"environment: {lost} (row train.jsonl:3)"
        assert session.reward("own.py:judge", 3.0, ATTEMPT) == f"judge: {lost} (row train.jsonl:3)"
        assert session.reward("own.py:plain", 3.0, ATTEMPT) == 0.5


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"id": 1, "how": "raises"}, "environment: ValueError: no such thing"),
        ({"id": 1, "how": "hangs"}, "environment took more than 2 s"),
        ({}, "environment: TypeError: Counter.reset() missing 1 required positional argument: 'id'"),
    ],
)
def test_an_environment_that_does_not_start_has_no_reward(counters, row, found):
    with closing(counters.open([0], row)) as session:
        assert why(session.start) == found
        assert why(session.call, "increment", {"step": 1}) == found
        assert session.reward("environment", 3.0, ATTEMPT) == f"environment: {found} (row train.jsonl:3)"


def test_a_reward_of_an_environment_is_a_number(counters):
    with closing(counters.open([0], {"id": 0})) as session:
        session.start()
        found = session.reward("environment", 3.0, ATTEMPT)
        assert found == "environment: ValueError: get_reward returned None (row train.jsonl:3)"


def test_sessions_run_at_the_same_time(counters):
    def played(number):
        with closing(counters.open([number], {"id": number})) as session:
            session.start()
            return [session.call("increment", {"step": 1}) for _ in range(3)]

    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(played, range(1, 25))]
    assert found == [[str(number + n) for n in (1, 2, 3)] for number in range(1, 25)]


@pytest.mark.long
def test_tools_compute_in_a_fork_of_a_process_that_computed(folder):
    lines = ["import torch", "ones = torch.ones(500, 500) @ torch.ones(500, 500)", "def f() -> float:"]
    (folder / "heavy.py").write_text("\n".join([*lines, '    """Do."""', "    return float((ones @ ones)[0, 0])"]))
    with closing(ToolHost(settings(["heavy.py:f"], timeout=30.0))) as host, closing(host.open([0], None)) as session:
        assert session.call("f", {}) == "125000000.0"


def test_a_stop_does_not_wait_for_calls(folder):
    (folder / "hangs").unlink(missing_ok=True)
    with host_of("fail", timeout=300.0, is_stopping=(folder / "hangs").exists) as host:
        host.schemas()
        started = time.monotonic()
        why(host.open([0], None).call, "fail", {"how": "hangs"})
        assert time.monotonic() - started < 5
        wait_for_the_end_of((folder / "hangs").read_text())


def test_nothing_outlives_a_run_that_is_killed(folder):
    (folder / "started").unlink(missing_ok=True)
    code = (
        "import os; from types import SimpleNamespace as Settings\n"
        "from kit.rollouts.tools.tool_processes import ToolHost\n"
        "recipe = Settings(tools=['own.py:fail'], environment=None, rewards=[], tool_timeout=60.0)\n"
        "session = ToolHost(recipe).open([0], None)\n"
        "session.call('fail', {'how': 'starts'}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    wait_for_the_end_of((folder / "started").read_text().strip())


@pytest.mark.parametrize(
    ("tools", "environment", "rewards", "found"),
    [
        (["none.py:f"], None, [], "none.py:f: there is no file 'none.py'"),
        (["own.py:none"], None, [], "own.py:none: own.py has no function 'none'"),
        (["bad.py:no_hint"], None, [], "bad.py:1: no_hint: Argument a is missing a type hint in function no_hint"),
        (["bad.py:no_text"], None, [], "bad.py:4: no_text: Cannot generate JSON schema for no_text because it has no"),
        (["bad.py:star"], None, [], "bad.py:8: star: * and ** have no JSON schema"),
        (["own.py:draw", "own.py:draw"], None, [], "draw is twice"),
        ([], "bad.py:NoReset", [], "bad.py:NoReset: no method reset"),
        ([], "bad.py:NoTool", ["environment"], "bad.py:NoTool: no method get_reward"),
        ([], "bad.py:NoTool", [], "bad.py:NoTool: no public method"),
        (["ends.py:f"], None, [], "it ended its process"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(folder, tools, environment, rewards, found):
    lines = ["def no_hint(a):", '    """Do."""', "", "def no_text(a: int): ...", "class NoReset: ..."]
    (folder / "bad.py").write_text(
        "\n".join([*lines, "class NoTool:", "    def reset(self): ...", "def star(*a): ..."])
    )
    (folder / "ends.py").write_text("import os; os._exit(0)")
    with closing(ToolHost(settings(tools, environment, rewards, 1.0))) as host, pytest.raises(UserError) as caught:
        host.schemas()
    assert found in str(caught.value)
