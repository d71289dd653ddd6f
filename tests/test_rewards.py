"""What rewards give, and that one which fails in any way costs the run nothing but its time."""

import time
from pathlib import Path

import pytest

from kit.rewards import Asked, Scorer, reward

OWN = """
import os, sys, time

def right(expected, answer, row):
    return 0.5 if answer == expected and row["id"] == 7 else 0.0

def bad(expected, answer, row):
    if answer == "hangs":
        open("hangs", "w").close()
        time.sleep(600)
    if answer == "raises":
        raise ValueError("no such thing")
    if answer == "none":
        return None
    if answer == "nan":
        return float("nan")
    if answer == "text":
        return "1"
    if answer == "ends":
        os._exit(3)
    if answer == "leaves":
        sys.exit("away")
    if answer == "prints":
        print("x" * 1_000_000)
    if answer == "forks" and not os.fork():
        open("forked", "w").write(str(os.getpid()))
        time.sleep(600)
    if answer == "forks":
        time.sleep(600)
    return 1.0
"""


def asked(answer, expected="", **changes):
    values = {"row": {"id": 7}, "origin": "train.jsonl:3", "num_tokens": 4, "max_new_tokens": 10, **changes}
    return Asked(expected=expected, answer=answer, **values)


def test_the_given_rewards():
    assert reward("exact_match", asked(" a ", "a")) == 1.0
    assert reward("number", asked("so it is 1,200", "#### 1200")) == 1.0
    assert reward("json", asked('{"a": 1}')) == 1.0 and reward("json", asked("{a: 1}")) == 0.0
    assert (
        reward("regex:<think>.*</think>", asked("<think>\n</think> 4")) == 1.0 and reward("regex:^x", asked("ax")) == 0
    )
    assert [reward("overlong:4", asked("", num_tokens=n)) for n in (1, 6, 8, 10)] == [0.0, 0.0, -0.5, -1.0]


def test_mathematics_is_judged_by_what_it_means():
    pytest.importorskip("math_verify")
    assert reward("math", asked("$\\\\frac{1}{2}$", "$0.5$")) == 1.0 and reward("math", asked("$2$", "$3$")) == 0.0


@pytest.mark.slow
def test_a_reward_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    scorer = Scorer(["own.py:right", "own.py:bad"], timeout_seconds=3.0, num_workers=2)
    kinds = ["fine", "raises", "none", "nan", "text", "ends", "leaves", "prints", "hangs", "forks", "fine"]
    began = time.monotonic()
    found = dict(zip(kinds, scorer([asked(kind, "fine") for kind in kinds]), strict=True))
    assert time.monotonic() - began < 60
    assert found["fine"] == [0.5, 1.0] and found["prints"] == [0.0, 1.0]
    for kind, words in {
        "raises": "own.py:12: ValueError: no such thing (row train.jsonl:3",
        "none": "returned None",
        "nan": "returned nan",
        "text": "returned '1'",
        "leaves": "SystemExit: away",
    }.items():
        assert found[kind][0] == 0.0 and words in found[kind][1], kind
    assert found["ends"] == [0.0, "ended its process (row train.jsonl:3)"]
    assert found["hangs"] == found["forks"] == [0.0, "took more than 3 s (row train.jsonl:3)"]
    forked = int((tmp_path / "forked").read_text())
    status = Path(f"/proc/{forked}/stat")
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "what a reward had started lives on"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_stop_does_not_wait_for_rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    scorer = Scorer(["own.py:right", "own.py:bad"], 300.0, 1, is_stopping=(tmp_path / "hangs").exists)
    assert scorer([asked("hangs"), asked("fine")]) == [[0.0], []]
