"""Ctrl-C before anything was begun: one line and status 130, also while a library that ignores it is imported."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

from kit import interrupt

# An import that ignores KeyboardInterrupt, as some of torch's and transformers' do, inside the handled part.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from kit import interrupt
interrupt.leave_on_ctrl_c()
{between}
try:
    os.kill(os.getpid(), signal.SIGINT)
    import time; time.sleep(10)
except BaseException as error:
    print("ignored", type(error).__name__)
"""


def ran(between="", **variables):
    command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT), between=between)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", interrupt.OWN_TORCHRUN)}
    return subprocess.run(command, capture_output=True, text=True, env=env | variables, timeout=60, preexec_fn=hear)


def hear():
    """Whoever runs the tests in the background of a script has Ctrl-C ignored in every process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_nothing_can_ignore_it():
    done = ran()
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{interrupt.BEFORE}\n")


def test_what_was_begun_can_be_ended_in_order():
    done = ran("interrupt.raise_on_ctrl_c()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ignored KeyboardInterrupt\n", "")


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", interrupt.OWN_TORCHRUN: "1"}])
def test_of_several_ranks_one_process_reports_it(variables):
    done = ran(**variables)
    assert (done.returncode, done.stderr) == (130, "")
    assert ran(RANK="0").stderr == f"\n{interrupt.BEFORE}\n"


def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it():
    code = SCRIPT.format(root=str(ROOT), between="").replace("sleep(10)", "sleep(0)") + "\nprint('went on')"
    code = code.replace("interrupt.leave_on", "signal.signal(signal.SIGINT, signal.SIG_IGN); interrupt.leave_on")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_it_waits_while_one_program_takes_the_place_of_another(tmp_path):
    """Else Python, which starts anew, would show a traceback."""
    late, first = tmp_path / "late.py", tmp_path / "first.py"
    late.write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n" + SCRIPT.format(root=str(ROOT), between="")
    )
    first.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom kit import interrupt\n"
        f"interrupt.become([sys.executable, {str(late)!r}], os.environ)\n"
    )
    command = [sys.executable, str(first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=hear)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{interrupt.BEFORE}\n")
