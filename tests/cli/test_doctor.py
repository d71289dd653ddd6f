"""``kit doctor`` as a user types it: lines while it works, and a status."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

from kit.cli.main import main

COMMAND = [sys.executable, "-m", "kit.cli.main", "doctor"]


def test_without_arguments_it_checks_this_machine_for_the_recipe_tiny(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    launch ") and lines[-1].endswith(" 0 fail")
    names = [line.split()[1] for line in lines[:-1]]
    assert names == ["launch", "driver", "bf16", "model", "data", "GPUs", "memory", "disk"]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_is_status_2(capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    assert main(["doctor"]) == 2
    assert "\nfail  disk              output_dir: 0 bytes free" in capsys.readouterr().out
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout: " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_the_kits_own_launcher_are_checked(tmp_path):
    command = [*COMMAND, "--config", "ddp", "--num_processes", "2", "--timeout", "5", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "\nok    all-reduce " in done.stdout, done.stdout + done.stderr
