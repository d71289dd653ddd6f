"""Disk, memory, file descriptors, names and ports: each shortage is named, with numbers and a fix."""

import resource
import shutil
import socket
from types import SimpleNamespace

import pytest

from kit.memory.needs import RunNeeds
from kit.strategy import network
from kit.tools.doctor import host
from kit.tools.doctor.host import check_disk, check_file_descriptors, check_memory, check_names, check_port

NEEDS = RunNeeds(loading=100, host=50, device=0, checkpoint=1000, num_checkpoints=3, final=500)


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that a disk has free."""
    return lambda number: monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=number))


@pytest.mark.parametrize(("number", "status"), [(1499, "fail"), (1500, "warn"), (3499, "warn"), (3500, "ok")])
def test_a_disk_takes_one_checkpoint_or_all_that_are_kept(number, status, free):
    free(number)
    result = check_disk("runs/mine", NEEDS)
    assert result.status == status
    assert "3 checkpoints of 1000 bytes and final/ of 500 bytes: 3.4 KiB" in result.found
    assert status == "ok" or "--save_total_limit" in result.fix


def test_the_disk_is_that_of_the_output_folder_which_need_not_be_there(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=1 << 40))
    assert check_disk(str(tmp_path / "a/b"), NEEDS).status == "ok"
    assert asked == [tmp_path]
    monkeypatch.setattr(host.os, "access", lambda path, mode: False)
    assert check_disk(None, NEEDS).found.endswith("cannot be written to")


@pytest.mark.parametrize(("number", "status"), [(299, "fail"), (300, "ok")])
def test_memory_holds_libraries_of_each_rank_and_the_larger_of_loading_and_training(number, status, monkeypatch):
    own = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=100))
    monkeypatch.setattr(host.psutil, "Process", lambda: own)
    monkeypatch.setattr(host, "host_memory", lambda: (number, number))
    assert check_memory(NEEDS, local_world=2).status == status


def test_few_file_descriptors_are_reported_for_the_number_of_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
        assert check_file_descriptors(2).status == "ok"
        result = check_file_descriptors(64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.status == "fail" and result.found == "160 allowed, 320 needed by a rank of 64"
    assert result.fix.startswith("ulimit -n 4096")


def test_a_name_matters_on_several_machines_only(monkeypatch):
    monkeypatch.setattr(network, "address_of", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert check_names(several_machines=False).status == "ok"
    result = check_names(several_machines=True, main_address="main")
    assert result.status == "fail" and "GLOO_SOCKET_IFNAME" in result.fix
    assert "main_process_ip: main means 127.0.1.1" in result.found and "node, the name of this machine" in result.found
    monkeypatch.setattr(network, "address_of", lambda name: "10.0.0.1")
    assert check_names(several_machines=True, main_address="main").status == "ok"


def test_a_port_that_is_taken_fails_where_the_run_needs_it():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        result = check_port(port, is_needed=True)
        assert (result.status, f"{port} is taken" in result.found) == ("fail", True)
        assert "--main_process_port" in result.fix
        assert check_port(port, is_needed=False).status == "warn"
    assert check_port(port, is_needed=True).status == "ok"
