"""What rewards give, and that one which fails in any way costs the run nothing but its time."""

import time
from pathlib import Path

import pytest

from kit.scoring.rewards import Attempt, Scorer, reward

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
        os.setsid()
        open("forked", "w").write(str(os.getpid()))
        time.sleep(600)
    if answer == "forks":
        time.sleep(600)
    return 1.0
"""


def attempt(answer, expected="", **changes):
    values = {"row": {"id": 7}, "origin": "train.jsonl:3", "num_tokens": 4, "max_new_tokens": 10, **changes}
    return Attempt(expected=expected, answer=answer, **values)


def test_the_given_rewards():
    assert reward("exact_match", attempt(" a ", "a")) == 1.0
    assert reward("number", attempt("so it is 1,200", "#### 1200")) == 1.0
    assert reward("json", attempt('{"a": 1}')) == 1.0 and reward("json", attempt("{a: 1}")) == 0.0
    assert (
        reward("regex:<think>.*</think>", attempt("<think>\n</think> 4")) == 1.0
        and reward("regex:^x", attempt("ax")) == 0
    )
    assert [reward("overlong:4", attempt("", num_tokens=n)) for n in (1, 6, 8, 10)] == [0.0, 0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("expected", "answer", "value"),
    [
        ("$0.5$", "$\\frac{1}{2}$", 1),
        ("$3$", "$2$", 0),
        ("x^2+1", "$x^2+1$", 1),
        ("x^2+1", "1+x^2", 1),
        (r"2\sqrt{3}", "2", 0),
        ("2", r"2\sqrt{3}", 0),
        (r"10\pi", "10", 0),
        (r"11\sqrt{2}", "11", 0),
        ("y = 2x + 3", "3", 0),
        (r"\$18.90", "18.90", 1),
        (r"x = 3 \text{ or } x = -3", r"$\{3,-3\}$", 1),
        *(("12", text, 1) for text in ("x is 12", "so 12", "12 USD", "12 km/h")),
        ("12 km/h", "they go at 12 km/h", 1),
        ("2 ln 2", "2", 0),
        ("He pays 3 * 4 = 12 dollars.\n#### 12", "so it is 12", 1),
        *((text, text, 1) for text in (r"\sqrt{2}", "Paris", "yes", r"\text{no solution}", "5 miles per hour")),
    ],
)
def test_mathematics_is_judged_by_what_it_means(expected, answer, value):
    pytest.importorskip("math_verify")
    assert reward("math", attempt(answer, expected)) == value


@pytest.mark.slow
def test_a_reward_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    scorer = Scorer(["own.py:right", "own.py:bad"], timeout_seconds=3.0, num_cores=2)
    kinds = ["fine", "raises", "none", "nan", "text", "ends", "leaves", "prints", "hangs", "forks", "fine"]
    submitted = [scorer.submit(attempt(kind, "fine")) for kind in kinds]
    found = {kind: each.result() for kind, each in zip(kinds, submitted, strict=True)}
    scorer.close()
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
    submitted = [scorer.submit(attempt(kind)) for kind in ("hangs", "fine")]
    assert [each.result() for each in submitted] == [[0.0], []]
