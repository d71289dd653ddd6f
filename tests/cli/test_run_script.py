"""The script's error message is reported, and no process outlives the command."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT

from kit.cli.main import main


def test_the_error_of_a_failed_run_is_reported_without_the_lines_of_its_launcher(temporary, script, capsys):
    for end, status, message in (
        (
            "print('error: seed: of no use\\n    -> another\\n'); sys.exit(2)",
            2,
            "error: seed: of no use\n    -> another\n",
        ),
        ("print('error: rank 0: step 3: loss nan\\nTraceback'); sys.exit(1)", 1, "error: rank 0: step 3: loss nan\n"),
        ("os.kill(os.getpid(), 9)", 1, "error: the run ended with status -9\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\nerror: the run ended with status 1\n"),
    ):
        script(f"import os, sys\nprint('loading', flush=True)\n{end}\n")
        assert main(["verify-resume"]) == status
        assert capsys.readouterr().err.endswith(message)
        assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(temporary, script, tmp_path, number):
    """One below the script is in a session of its own, and deaf to SIGTERM."""
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    path = script(f"""
import os, subprocess, sys, time
pids = [os.getpid(), subprocess.Popen([sys.executable, "-c", {deaf!r}], start_new_session=True).pid]
open({str(tmp_path / "pids.partial")!r}, "w").write(" ".join(map(str, pids)))
os.rename({str(tmp_path / "pids.partial")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
""")
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
import kit.cli.main, kit.tools.verify_resume.run_script
kit.tools.verify_resume.run_script.SCRIPT = Path({str(path)!r})
sys.exit(kit.cli.main.main(["verify-resume"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "pids").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        process.send_signal(number)
        assert process.wait(120) == 130
        assert not any(map(runs, pids)) and list(temporary.iterdir()) == []
    finally:
        process.kill()


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
