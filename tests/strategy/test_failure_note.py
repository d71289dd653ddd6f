"""A process that fails leaves its reason in a store, and those of other machines end with it."""

import threading
import time

import pytest
from helpers import free_port
from torch.distributed import TCPStore

from kit.strategy import failure_note
from kit.strategy.failure_note import FailedElsewhere, FailureNote, find_note, leave_note, meets_at, report_to_others
from kit.strategy.machines import Machines

NOTE = FailureNote("rank 1 on beta", 2, "error: --learning_rat: unknown flag\n    -> did you mean 'learning_rate'?")


@pytest.fixture
def store():
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_the_first_note_stays_and_ends_others_with_its_status(store):
    assert find_note(store) is None
    leave_note(store, NOTE, readers=1, seconds=0)
    leave_note(store, FailureNote("rank 0 on alpha", 1, "rank 1 is gone"), readers=1, seconds=60)  # an echo: no wait
    found = find_note(store)
    assert found == NOTE
    error = FailedElsewhere(found)
    assert error.exit_status == 2 and str(error).startswith("rank 1 on beta failed, and so this run ends:\n--learn")


def test_a_note_of_another_run_at_the_same_port_is_not_read(store):
    leave_note(store, NOTE, readers=0, run="mine")
    assert find_note(store, "other") is None and find_note(store, "mine") == NOTE


def test_who_leaves_a_note_waits_until_it_is_read_and_no_longer(store):
    reading = threading.Timer(0.3, lambda: find_note(store))
    reading.start()
    began = time.monotonic()
    leave_note(store, NOTE, readers=1, seconds=50)
    assert 0.3 <= time.monotonic() - began < 40


@pytest.fixture
def machine(monkeypatch):
    """This process as a command for two machines that starts no rank; ``machine(keeps_store)``."""

    def machine(port, keeps_store):
        meets_at(Machines(2, "localhost", port, keeps_store, 60), "run")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(failure_note.RUN, "")
    monkeypatch.setattr(failure_note, "_machines", [])
    return machine


def test_a_command_that_is_wrong_on_the_machine_that_keeps_the_store_reaches_the_others(machine):
    port = free_port()
    machine(port, keeps_store=True)
    telling = threading.Thread(target=report_to_others, args=(2, "error: wrong"))
    telling.start()
    other = TCPStore("localhost", port, is_master=False, wait_for_workers=False)  # waits until there is one
    end = time.monotonic() + 20
    while (found := find_note(other, "run")) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    telling.join(20)
    assert (found.status, found.text) == (2, "error: wrong") and not telling.is_alive()


def test_a_command_that_is_wrong_on_another_machine_reaches_the_one_that_keeps_the_store(machine, store):
    machine(store.port, keeps_store=False)
    threading.Timer(0.2, lambda: find_note(store, "run")).start()
    report_to_others(2, "error: wrong")
    assert find_note(store, "run").text == "error: wrong"


def test_a_store_that_is_not_there_costs_a_few_seconds_and_no_error(machine, monkeypatch):
    monkeypatch.setattr(failure_note, "LATE_SECONDS", 0.5)
    machine(free_port(), keeps_store=False)
    began = time.monotonic()
    report_to_others(2, "error: wrong")
    assert time.monotonic() - began < 10


def test_ranks_that_a_launcher_restarts_leave_no_note(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert failure_note.rank_notes_are_used()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert not failure_note.rank_notes_are_used()
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # one machine: its launcher ends all
    assert not failure_note.rank_notes_are_used()
