"""The kit's launcher starts the ranks; their results come as lines; whatever ends them, nothing stays behind."""

import sys
import time

import psutil
import pytest

from kit.tools.doctor import starting
from kit.tools.doctor.ranks import NO_ANSWER_FIX
from kit.tools.doctor.result import Report
from kit.tools.doctor.starting import start_ranks

pytestmark = pytest.mark.slow


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts a script in place of the launcher. Returns the results, in words."""

    def started(script):
        path = tmp_path / "launcher.py"
        path.write_text(f"import json, os, subprocess, sys, time\n{script}")
        command = [sys.executable, str(path)]
        monkeypatch.setattr(starting, "torchrun_command", lambda *args, **kwargs: (command, None))
        report = Report(lambda result: None)
        start_ranks(report, [], 2, 1.0, True)
        return [f"{result.status} {result.name}: {result.found}" for result in report.results]

    return started


LINE = "print(json.dumps({{'name': 'ranks', 'status': {!r}, 'found': 'here', 'fix': {!r}}}), flush=True)\n"


def test_results_are_taken_from_lines_and_other_lines_passed_over(started):
    assert started(f"print('hello')\nprint('[1]')\n{LINE.format('ok', '')}") == ["ok ranks: here"]


def test_ranks_that_end_without_a_result_are_reported_with_their_last_words(started):
    script = "print('error: MASTER_PORT: 1 is in use\\nmore', file=sys.stderr)\nsys.exit(2)\n"
    assert started(script) == ["fail ranks: ended with status 2: error: MASTER_PORT: 1 is in use"]
    assert started("sys.exit('boom')") == ["fail ranks: ended with status 1: boom"]
    assert started(LINE.format("fail", "repair") + "sys.exit(2)") == ["fail ranks: here"]


def test_nothing_stays_behind_after_a_rank_did_not_answer(started):
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    began, before = time.monotonic(), psutil.Process().children(recursive=True)
    assert started(f"{sleeper}{LINE.format('fail', NO_ANSWER_FIX)}time.sleep(600)") == ["fail ranks: here"]
    assert time.monotonic() - began < 30
    assert psutil.Process().children(recursive=True) == before


def test_ranks_without_any_result_time_out(started, monkeypatch):
    monkeypatch.setattr(starting, "hard_limit", lambda seconds: 0.2)
    monkeypatch.setattr(starting, "START_SECONDS", 0)
    assert started("time.sleep(600)") == ["fail ranks: no result from any rank"]
