"""Ctrl-C before any work ends the process, also while a library that ignores it is imported."""

import signal
import subprocess
import sys

from helpers import ROOT

# An import that ignores KeyboardInterrupt, as some of torch's and transformers' do, inside the handled part.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from kit.system import interrupt
{before}
interrupt.leave_on_ctrl_c()
{between}
try:
    os.kill(os.getpid(), signal.SIGINT)
    import time; time.sleep(0.1)
    print("went on")
except BaseException as error:
    print("ignored", type(error).__name__)
"""


def ran(before="", between=""):
    command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT), before=before, between=between)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=hear)
    return done.returncode, done.stdout, done.stderr


def hear():
    """Whoever runs the tests in the background of a script has Ctrl-C ignored in every process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_a_process_at_once_or_after_a_clean_up_unless_ignored():
    assert ran() == (-signal.SIGINT, "", "")
    assert ran(between="interrupt.raise_on_ctrl_c()") == (0, "ignored KeyboardInterrupt\n", "")
    assert ran(before="signal.signal(signal.SIGINT, signal.SIG_IGN)") == (0, "went on\n", "")
