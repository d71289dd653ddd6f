"""One process holds a folder for its lifetime; the next one knows how it ended."""

import os
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from kit.system import lock
from kit.system.errors import UserError

HOLDING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kit.system import lock
print(lock.acquire(Path(sys.argv[2])), flush=True)
lock.sign(Path(sys.argv[2]))
exec(sys.stdin.readline())
"""


@pytest.fixture
def holder(tmp_path):
    """Starts processes that take the folder, and gives what ``take`` gave them."""
    started = []

    def start():
        words = [sys.executable, "-c", HOLDING, str(ROOT), str(tmp_path)]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        notes = started[-1].stdout.readline().strip()
        wait_until_signed(tmp_path, started[-1].pid)
        return started[-1], notes

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """Locks that a test takes end with it."""
    files = {}
    monkeypatch.setattr(lock, "_held", files)
    yield
    for file in files.values():
        file.close()


def wait_until_signed(folder, pid):
    end = time.monotonic() + 60
    while lock.read(folder).get("pid") != pid:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_second_process_learns_who_holds_the_lock(tmp_path, holder):
    process, notes = holder()
    assert notes == "[]"
    owner = rf"output_dir: .* is in use by process {process.pid} on .* \(since \d"
    with pytest.raises(UserError, match=owner):
        lock.acquire(tmp_path)
    with pytest.raises(UserError, match=owner):
        lock.check_free(tmp_path)


@pytest.mark.slow
def test_the_lock_of_an_owner_that_was_killed_is_free(tmp_path, holder):
    process, _ = holder()
    process.kill()
    process.wait()
    lock.check_free(tmp_path)
    assert holder()[1] == "[]"


def test_a_signature_is_read_and_a_damaged_one_is_empty(tmp_path):
    assert lock.read(tmp_path) == {}
    lock.acquire(tmp_path)
    assert lock.read(tmp_path) == {}
    lock.sign(tmp_path)
    about = lock.read(tmp_path)
    assert about["pid"] == os.getpid()
    for text in ("", "{", "[]", "3", "{}", "[" * 200_000):
        (tmp_path / ".lock").write_text(text)
        assert lock.read(tmp_path) == {}


def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path, holder):
    process, _ = holder()
    process.stdin.write("os.fork() or __import__('time').sleep(5); os._exit(0)\n")
    process.stdin.flush()
    process.wait(60)  # the parent goes at once, the child stays
    assert lock.acquire(tmp_path) == []


def test_a_disk_without_locks_costs_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    (text,) = lock.acquire(tmp_path)
    assert "cannot be locked (Operation not supported): do not start a second run in it" in text
    lock.check_free(tmp_path)
