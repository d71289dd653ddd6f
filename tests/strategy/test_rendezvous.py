"""Ranks meet, or say who did not come; a mistake that one of them finds stops all of them."""

import socket
import subprocess
import sys

import pytest
from helpers import ROOT, free_port
from torch.distributed import TCPStore

from kit.errors import Problem, TrainingError, UserError
from kit.strategy import rendezvous
from kit.strategy.failure_note import FailureNote, leave_note
from kit.strategy.rendezvous import join_group, open_store, together


def test_a_problem_of_one_rank_is_raised_on_all_ranks(monkeypatch):
    problem = Problem("output_dir", "cannot be written to")
    monkeypatch.setattr("accelerate.utils.gather_object", lambda found: [*found, problem])
    with pytest.raises(UserError, match="cannot be written to"), together(None):
        pass
    with pytest.raises(UserError) as caught, together(None):
        raise UserError(problem, Problem("dataset", "gone"))
    assert len(caught.value.problems) == 2
    monkeypatch.setattr("accelerate.utils.gather_object", lambda found: found)
    with together(None):
        pass


@pytest.fixture
def rank_of_two(monkeypatch):
    """This process as one of two ranks."""

    def rank_of_two(rank, port):
        values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return rank_of_two


@pytest.mark.slow
def test_ranks_that_did_not_come_in_time_are_named(rank_of_two):
    rank_of_two(0, free_port())
    with pytest.raises(TrainingError, match=r"not all 2 processes came within 1 s \(--ddp_timeout\): rank 1 did not"):
        join_group("gloo", 1)


@pytest.mark.slow
def test_a_rank_that_waits_for_rank_0_names_it(rank_of_two):
    port = free_port()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # the launcher's
    rank_of_two(1, port)
    with pytest.raises(TrainingError, match="rank 0 did not come"):
        join_group("gloo", 1)
    del store


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_ends_at_once_with_the_reason_of_one_that_failed_before(rank_of_two, rank, monkeypatch):
    port = free_port()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # the launcher's
    rank_of_two(rank, port)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("kit.strategy.rendezvous.is_own", lambda address: True)
    leave_note(store, FailureNote("rank 5 on beta", 2, "error: cache: is full\n    -> make room"), 1, seconds=0)
    with pytest.raises(TrainingError, match=r"rank 5 on beta failed.*\ncache: is full\n    -> make room") as caught:
        join_group("gloo", 60)
    assert caught.value.exit_status == 2
    assert store.add("kit/failure/read", 0) == 1


def test_a_port_that_is_taken_is_a_users_problem(rank_of_two):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        rank_of_two(0, other.getsockname()[1])
        with pytest.raises(UserError, match=r"MASTER_PORT: \d+ is in use on this machine; .*\n.*--master_port"):
            join_group("gloo", 1)


MEETING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from accelerate import Accelerator
from kit.strategy.rendezvous import join_group, open_store
join_group("gloo", 60)
Accelerator(cpu=True)
number = torch.tensor([float(torch.distributed.get_rank() + 1)])
torch.distributed.all_reduce(number)
store = open_store()
store.call(lambda store: store.set(f"here/{torch.distributed.get_rank()}", "1"))
store.call(lambda store: store.wait(["here/0", "here/1"]))
print(number.item())
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_two_ranks_meet_and_share_a_store(rank_of_two):
    port = free_port()
    processes = []
    for rank in (1, 0):
        rank_of_two(rank, port)
        command = [sys.executable, "-c", MEETING, str(ROOT)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        assert [process.communicate(timeout=100)[0] for process in processes] == ["3.0\n", "3.0\n"]
    finally:
        for process in processes:
            process.kill()


BLOCKED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from kit.strategy.rendezvous import _ending_after
with _ending_after(0.1):
    time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_that_met_and_cannot_connect_end_with_the_reason(rank_of_two):
    rank_of_two(1, 29500)
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(ROOT)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "rank 1: met the other ranks at localhost:29500, but did not reach" in done.stderr
    assert "GLOO_SOCKET_IFNAME" in done.stderr


def test_a_store_that_is_gone_is_named_by_its_address(rank_of_two, monkeypatch):
    """As when the cable is pulled while the ranks connect; also for ranks whose launcher kept the store."""
    port = free_port()
    rank_of_two(1, port)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "from_main", lambda make: make())
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_KEPT_SECONDS", 0.3)
    with pytest.raises(TrainingError, match=f"localhost:{port}, where the ranks meet, does not answer "):
        open_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(TrainingError, match=f"localhost:{port}, where the ranks meet, does not answer "):
        join_group("gloo", 60)


def test_one_process_has_no_store_and_needs_none():
    assert open_store() is None
