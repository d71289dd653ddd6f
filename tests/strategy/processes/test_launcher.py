"""Launchers and their ranks: signals, early ends, exit statuses."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from helpers import ROOT, matrix

from kit.strategy.processes.launcher import (
    end_with_launcher,
    launcher_has_ended,
    num_processes_of_accelerate,
)


def test_a_command_without_a_launcher_is_not_ended(monkeypatch):
    monkeypatch.delenv("KIT_ACCELERATE_PID", raising=False)
    assert not launcher_has_ended()
    monkeypatch.setenv("KIT_ACCELERATE_PID", str(os.getppid()))
    monkeypatch.delenv("RANK", raising=False)
    assert not launcher_has_ended()
    monkeypatch.setenv("KIT_ACCELERATE_PID", str(os.getpid()))  # the parent is another one now
    assert launcher_has_ended()
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: ["python", "mine.py"])
    end_with_launcher()  # the variable is of a command that started this one
    assert "KIT_ACCELERATE_PID" not in os.environ and not launcher_has_ended()


def test_flags_of_accelerate_stand_before_the_script(monkeypatch):
    cases = {
        "python accelerate launch --num_processes 4 run.py --num_processes 2": 4,
        "python -m accelerate.commands.launch --num-processes=3 run.py": 3,
        "python accelerate launch run.py --num_processes 2": None,
        "torchrun --num_processes 4 run.py": None,
    }
    monkeypatch.setattr("sys.argv", ["run.py"])
    for words, asked in cases.items():
        monkeypatch.setattr(psutil.Process, "cmdline", lambda self, words=words: words.split())
        assert num_processes_of_accelerate() == asked, words


RANK = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from kit.failures import exits
rank = int(os.environ["RANK"])
def stop(*_):
    exits.leave(75)
signal.signal(signal.SIGUSR1, stop)
{code}
"""
MISTAKE = 'if rank: print("error: mine", file=sys.stderr); exits.leave(2)\ntime.sleep(60)'
KILLED = "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"


@pytest.fixture
def torchrun(tmp_path):
    """Starts two ranks that execute some code under the kit's launcher; returns the process."""

    def torchrun(code):
        script = tmp_path / "rank.py"
        script.write_text(RANK.format(root=str(ROOT), code=code))
        words = "--nproc_per_node=2 --rdzv_endpoint=127.0.0.1:0 --rdzv_conf=is_host=1"
        words += " --signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
        command = [sys.executable, str(ROOT / "kit/strategy/launch/torchrun_main.py"), *words.split(), str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "said"),
    matrix([(MISTAKE, 2, "error: mine\n"), (KILLED, 137, "\nerror: rank 1 was killed by SIGKILL, as Linux does")], 2),
)
def test_the_status_is_that_of_the_rank_and_only_the_rank_prints(torchrun, code, status, said):
    process = torchrun(code)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (status, "") and err.startswith(said) and "Traceback" not in err


@pytest.mark.slow
def test_after_a_signal_the_status_is_that_of_the_ranks(torchrun):
    process = torchrun('os.write(1, b"ready\\n")\ntime.sleep(60)')
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (75, "")
