"""Ranks join, or report who did not; a mistake that one of them finds stops all of them."""

import socket

import psutil
import pytest
from helpers import free_port

from kit.strategy.processes import rendezvous
from kit.strategy.processes.rendezvous import join_group, open_store, together
from kit.strategy.processes.tcp_store import connect, serve
from kit.system.errors import Problem, TrainingError, UserError


def test_a_problem_of_one_rank_is_raised_on_all_ranks(monkeypatch):
    problem = Problem("output_dir", "cannot be written to")
    monkeypatch.setattr("accelerate.utils.gather_object", lambda found: [*found, problem])
    with pytest.raises(UserError) as caught, together(None):
        raise UserError(Problem("dataset", "gone"))
    assert len(caught.value.problems) == 2
    with pytest.raises(UserError, match="cannot be written to"), together(None):
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
def test_ranks_that_did_not_join_in_time_are_named(rank_of_two):
    rank_of_two(0, free_port())
    with pytest.raises(TrainingError, match=r"not all 2 processes joined within 1 s \(--ddp_timeout\): rank 1 did not"):
        join_group("gloo", 1)


def test_a_store_listens_on_the_address_that_it_is_given_only():
    store = serve("127.0.0.2", 0, 10)
    found = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == store.port}
    assert found == {"127.0.0.2"}
    connect("127.0.0.2", store.port, 5).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.2", store.port, 10)


def test_a_port_that_is_taken_is_a_users_problem(rank_of_two):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        rank_of_two(0, other.getsockname()[1])
        with pytest.raises(UserError, match=r"MASTER_PORT: \d+ is in use on this machine; .*\n.*--master_port"):
            join_group("gloo", 1)


def test_a_lost_store_is_named_by_its_address(rank_of_two, monkeypatch):
    """As when the cable is pulled while the ranks connect; also for ranks whose launcher kept the store."""
    port = free_port()
    rank_of_two(1, port)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_KEPT_SECONDS", 0.3)
    with pytest.raises(TrainingError, match=f"the rendezvous store at localhost:{port} does not answer "):
        open_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(TrainingError, match=f"the rendezvous store at localhost:{port} does not answer "):
        join_group("gloo", 60)


def test_a_rank_that_was_in_the_store_before_is_refused(rank_of_two, monkeypatch):
    """A launcher that starts ranks again in place may keep the store."""
    store = serve("127.0.0.1", 0, 10)
    store.add("here/1", 1)
    rank_of_two(1, store.port)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UserError, match="--max_restarts: the launcher restarted these ranks"):
        join_group("gloo", 5)


def test_one_process_has_no_store_and_needs_none():
    assert open_store() is None


def test_the_own_name_is_asked_only_where_other_machines_have_ranks(rank_of_two, monkeypatch):
    monkeypatch.setattr(rendezvous, "check_own_name", lambda: [Problem("host name", "means loopback")])
    for ranks_here, is_asked in (("1", True), ("2", False)):
        store = serve("127.0.0.1", 0, 10)
        rank_of_two(1, store.port)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
        store.set("all", "here")
        store.set("result", '[{"where": "seed", "found": "differs"}]')
        with pytest.raises(UserError, match="seed: differs"):
            join_group("gloo", 5)
        assert (b"means loopback" in store.get("facts/1")) == is_asked
