"""Ranks meet, or say who did not come; a mistake that one of them finds stops all of them."""

import socket
import subprocess
import sys

import pytest
from helpers import ROOT, free_port
from torch.distributed import TCPStore

from kit.errors import Problem, TrainingError, UserError
from kit.strategy.rendezvous import agree, join_group, open_store, together


def test_ranks_that_found_other_data_stop_before_a_step(monkeypatch):
    other = {"dataset": ("other", 6)}
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: [*values, other, *values])
    with pytest.raises(
        UserError, match=r"dataset: rank 1 found something else than rank 0; expected the same on every"
    ):
        agree(None, dataset=("ours", 6))
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: values * 3)
    agree(None, dataset=("ours", 6))


def test_all_that_ranks_disagree_on_is_told_at_once(monkeypatch):
    others = [{"dataset": "a", "output_dir": "y"}, {"dataset": "b", "output_dir": "x"}, {"dataset": "b"}]
    others[2]["output_dir"] = "y"
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: [*values, *others])
    with pytest.raises(UserError) as caught:
        agree(None, dataset="a", output_dir="x")
    told = [(problem.where, problem.found.split(" found")[0]) for problem in caught.value.problems]
    assert told == [("dataset", "rank 2, 3"), ("output_dir", "rank 1, 3")]


def test_what_one_rank_finds_wrong_stops_the_others_with_the_same_words(monkeypatch):
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
def test_who_did_not_come_in_time_is_named(rank_of_two):
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
store.set(f"here/{torch.distributed.get_rank()}", "1")
store.wait(["here/0", "here/1"])
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


def test_one_process_has_no_store_and_needs_none():
    assert open_store() is None
