"""Launchers meet whatever their clocks say, execute nothing that they are sent, and listen on one address."""

import pickle
import socket
import subprocess
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from kit.strategy import meeting


@pytest.fixture
def clock(monkeypatch):
    """The own steady clock: ``clock.seconds`` is what it shows."""

    class Clock:
        seconds = 0.0

        def now(self, tz):
            return datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    clock = Clock()
    monkeypatch.setattr(meeting, "_SteadyClock", clock)
    monkeypatch.setattr(dynamic, "datetime", clock)
    return clock


@pytest.fixture
def launcher(clock):
    """Another launcher, whose clock is ``ahead`` of the own one, in the state that this one reads."""
    store = HashStore()
    settings = dynamic.RendezvousSettings("run", 2, 2, dynamic.RendezvousTimeout(), timedelta(seconds=5), 3)
    holder = meeting._StateHolder(meeting._Backend(store, "run"), settings)
    holder._cache_duration = 0
    theirs = dynamic._RendezvousState()
    node = dynamic._NodeDesc("other", 1, 0)

    class Launcher:
        def beats(self, ahead):
            theirs.participants[node] = 0
            theirs.last_heartbeats[node] = clock.now(UTC) + timedelta(seconds=ahead)
            store.set("torch.rendezvous.run", b64encode(pickle.dumps(theirs)).decode())

        def is_known(self):
            holder.sync()
            assert holder.state.last_heartbeats.get(node) in (None, theirs.last_heartbeats[node])  # not the own time
            return node in holder.state.participants

    return Launcher()


@pytest.mark.parametrize("ahead", [-600, -20, 0, 20, 600])
def test_a_launcher_that_beats_is_kept_and_a_silent_one_is_dropped_whatever_its_clock_says(clock, launcher, ahead):
    for _ in range(5):
        launcher.beats(ahead)
        clock.seconds += 5
        assert launcher.is_known()
    clock.seconds += 14
    assert launcher.is_known()
    clock.seconds += 2
    assert not launcher.is_known() and not launcher.is_known()
    launcher.beats(ahead)
    assert launcher.is_known()


def test_correcting_the_clock_of_a_machine_stops_no_heartbeat(monkeypatch):
    monkeypatch.setattr(dynamic, "datetime", meeting._SteadyClock)
    before = dynamic.datetime.now(UTC)
    assert type(before) is datetime and abs(before - datetime.now(UTC)) < timedelta(hours=1)
    monkeypatch.setattr(meeting.time, "time", lambda: 0.0)
    assert timedelta() <= dynamic.datetime.now(UTC) - before < timedelta(minutes=1)


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self.path)],)


@pytest.mark.parametrize("make", [Command, lambda path: {"state": Command(path)}, lambda path: b"no pickle"])
def test_what_someone_else_puts_into_the_store_is_not_executed(launcher, clock, tmp_path, make):
    store = HashStore()
    backend = meeting._Backend(store, "run")
    value = make(tmp_path / "executed")
    state = value if isinstance(value, bytes) else pickle.dumps(value)
    store.set("torch.rendezvous.run", b64encode(state).decode())
    with pytest.raises(RendezvousStateError, match="not torch's"):
        backend.get_state()
    assert not (tmp_path / "executed").exists()


def handler(endpoint, **settings):
    settings = {"is_host": "1", "join_timeout": "5", "read_timeout": "5", **settings}
    return meeting._make_handler(RendezvousParameters("kit", endpoint, "none", 1, 1, "127.0.0.1", **settings))


def listening():
    return {each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}


def test_one_machine_has_one_port_and_that_on_loopback():
    before = listening()
    met = handler("localhost:0")
    assert listening() == before  # only this process has the store of its rendezvous
    found = met.next_rendezvous()
    (address,) = listening() - before
    assert (address.ip, address.port) == ("127.0.0.1", found.bootstrap_store_info.master_port)
    assert (found.rank, found.world_size) == (0, 1)
    met.shutdown()


def test_the_store_of_several_machines_listens_on_the_address_that_they_are_given():
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    before = listening()
    met = handler(f"127.0.0.2:{port}")
    assert [each.ip for each in listening() - before] == ["127.0.0.2"] and met
    with pytest.raises(RendezvousConnectionError, match="in use"):
        handler(f"127.0.0.2:{port}")
