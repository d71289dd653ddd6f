"""Importing the kit on a system that it does not run on."""

import subprocess
import sys

from helpers import ROOT


def test_windows_is_answered_in_two_lines_and_not_by_a_missing_module():
    for script in [
        "recipes/finetune.py",
        "recipes/score.py",
        "recipes/sample.py",
        "recipes/export.py",
        "kit/cli/main.py",
    ]:
        code = "import runpy, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; "
        code += f"runpy.run_path({script!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == "", script
        first, fix = done.stderr.splitlines()
        assert first.startswith("error: Windows: ") and "WSL2" in fix, script
