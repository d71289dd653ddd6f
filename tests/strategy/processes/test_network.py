"""Host names that other machines cannot reach are found, with the interface to set."""

import socket

import pytest

from kit.strategy.processes.network import check_main_address, check_own_name


@pytest.fixture
def addresses(monkeypatch):
    """Sets what names resolve to."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def addresses(**known):
        def resolve(name, *args, **options):
            if name not in known:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

        monkeypatch.setattr(socket, "gethostname", lambda: "node")
        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return addresses


def test_an_own_name_that_means_loopback_or_nothing_is_a_problem_with_the_interface(addresses, monkeypatch):
    for known, found in (({"node": "127.0.1.1"}, "resolves to 127.0.1.1"), ({}, "has no address")):
        addresses(**known)
        problem = check_own_name()[0]
        assert problem.found.startswith("node, the name of this machine, ") and found in problem.found
        assert "on node: export GLOO_SOCKET_IFNAME=eth0 NCCL" in problem.fix
    addresses(node="10.0.0.1")
    assert check_own_name() == []
    addresses(node="127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert check_own_name() == []


def test_the_main_address_must_be_one_that_others_reach(addresses):
    addresses(main="10.0.0.1", local="127.0.0.1")
    assert check_main_address("main", "main_process_ip") == []
    assert "main_process_ip: local resolves to 127.0.0.1" in str(check_main_address("local", "main_process_ip")[0])
    assert "elsewhere has no address" in str(check_main_address("elsewhere", "MASTER_ADDR")[0])
