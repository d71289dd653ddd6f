"""The kit's own torchrun is silent where a rank has spoken, and ends as the ranks ended."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

from kit.strategy import torchrun as torchrun_module

RANK = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from kit.failures import exits
rank = int(os.environ["RANK"])
def stop(*_):
    exits.leave(75)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGUSR1, stop)
{code}
"""
KILLS_THE_OTHER = """
if rank:
    time.sleep(60)
import psutil
from kit.strategy.launcher import record_exit
time.sleep(1)
print("error: rank 1 hangs", file=sys.stderr, flush=True)
hung = next(child.pid for child in psutil.Process(os.getppid()).children() if child.pid != os.getpid())
record_exit(1, is_final=False, killed=[hung])
os.kill(hung, signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """Starts two ranks that execute some code; returns the process."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))

    def torchrun(code, *flags):
        script = tmp_path / "rank.py"
        script.write_text(RANK.format(root=str(ROOT), code=code))
        command = [sys.executable, str(ROOT / "kit/strategy/torchrun.py"), "--nproc_per_node=2"]
        command += ["--rdzv_endpoint=localhost:0", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", *flags, str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "said"),
    matrix(
        [
            ('if rank: print("error: mine", file=sys.stderr); exits.leave(2)\ntime.sleep(60)', 2, "error: mine\n"),
            (
                "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
                137,
                "\nerror: rank 1 was killed by SIGKILL, as Linux does when memory runs out\n",
            ),
            (KILLS_THE_OTHER, 1, "error: rank 1 hangs\n"),
            ("exits.leave(0)", 0, ""),
        ],
        always=2,
    ),
)
def test_the_status_is_that_of_the_rank_and_only_the_rank_speaks(torchrun, code, status, said):
    process = torchrun(code)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (status, "", said)


@pytest.mark.slow
@pytest.mark.parametrize("number", matrix([signal.SIGINT, signal.SIGUSR1]))
def test_after_a_signal_the_status_is_that_of_the_ranks(torchrun, number):
    process = torchrun('print("ready", flush=True)\ntime.sleep(60)')
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    assert process.wait(60) == 75
    assert process.stderr.read() == ""


def test_no_rank_is_started_after_accelerate_launch_has_ended(monkeypatch):
    monkeypatch.setenv("KIT_ACCELERATE_PID", "1")
    assert torchrun_module.main(["--no_such_flag"]) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.long
def test_restarts_are_torchruns_own(torchrun, tmp_path):
    process = torchrun(
        f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\ntime.sleep(1)\nos._exit(3)", "--max_restarts=1"
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3 and not err
    assert (tmp_path / "starts").read_text() == "xxxx"


ENDS_WHILE_THREADS_CALL_A_STORE = """
import threading, time
from torch.distributed import TCPStore
from kit.strategy import torchrun

def ask(store):
    while True:
        store.check(["note"])

kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for _ in range(4):
    store = TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False)
    threading.Thread(target=ask, args=(store,), daemon=True).start()
time.sleep(0.3)
torchrun.main = lambda argv: 2
torchrun.launch([])
"""


def test_a_launcher_whose_threads_ask_the_store_ends_with_its_own_status():
    done = subprocess.run([sys.executable, "-c", ENDS_WHILE_THREADS_CALL_A_STORE], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, b"")
