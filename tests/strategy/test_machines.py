"""A machine says whom it waits for, and does not wait longer than it says."""

import socket
from argparse import Namespace

import pytest

from kit.errors import TrainingError, UserError
from kit.strategy.machines import Machines


def arguments(words):
    """What torchrun makes of its command line."""
    return Namespace(**{word[2:]: words[i + 1] for i, word in enumerate(words) if word.startswith("--")})


def test_the_arguments_of_torchrun_hold_all_fields():
    machines = Machines(3, "10.0.0.1", 29500, is_host=True, timeout_seconds=20)
    assert Machines.from_arguments(arguments(machines.arguments())) == machines
    assert Machines.from_arguments(Namespace(nnodes="1:1")) is None


def test_a_machine_says_whom_it_waits_for():
    text = Machines(3, "10.0.0.1", 29500, is_host=True, timeout_seconds=20).waiting_line()
    assert "waits at 10.0.0.1:29500 for 2 more of 3 machines, at most 20 s (--ddp_timeout)" in text
    text = Machines(3, "10.0.0.1", 29500, is_host=False, timeout_seconds=20).waiting_line()
    assert "waits for 10.0.0.1:29500 (main_process_ip), at most 20 s (--ddp_timeout)" in text


def test_a_machine_that_does_not_answer_is_named_with_the_time_that_was_said():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(TrainingError, match=rf"127.0.0.1:{port} .* within 0 s .*\n.*the same command on every"):
            Machines(2, "127.0.0.1", port, is_host=False, timeout_seconds=0).reach_store()


def test_the_own_address_is_that_of_the_way_to_the_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        machines = Machines(2, "127.0.0.1", server.getsockname()[1], is_host=False, timeout_seconds=20)
        assert machines.reach_store() == "127.0.0.1"


def test_the_host_waits_for_the_others_and_needs_its_port():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"main_process_port: {port} on .*: Address already in use"):
            Machines(4, "127.0.0.1", port, is_host=True, timeout_seconds=20).reach_store()
    assert Machines(4, "127.0.0.1", port, is_host=True, timeout_seconds=20).reach_store() == "127.0.0.1"
