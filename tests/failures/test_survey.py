"""One rank finds out for all who is gone, and the work of the store grows with the ranks, not with their square."""

import json
import threading
from collections import Counter

import pytest

from kit.failures import survey
from kit.failures.survey import RankStatus, Survey, Surveys


class Store:
    """A key-value store of threads that counts the calls, and the bytes of what it answers, by thread."""

    address = "10.0.0.1:29500"

    def __init__(self):
        self.values, self.calls, self.bytes, self.lock = {}, Counter(), Counter(), threading.Lock()
        self.alive = set()  # ranks that beat between any two readings of their status
        self.num_readings = 0  # of the statuses of all ranks
        self.barrier = threading.Barrier(1, timeout=10)  # all who ask have made their first call
        self.met = set()

    def call(self, function):
        with self.lock:
            result = function(self)
        if threading.current_thread() not in self.met:
            self.met.add(threading.current_thread())
            self.barrier.wait()
        return result

    def _answer(self, value, size=8):
        self.calls[threading.current_thread().name] += 1
        self.bytes[threading.current_thread().name] += size
        return value

    def set(self, key, text):
        self._answer(self.values.__setitem__(key, text.encode()))

    def add(self, key, number):
        self.values[key] = str(int(self.values.get(key, 0)) + number).encode()
        return self._answer(int(self.values[key]))

    def check(self, keys):
        return self._answer(all(key in self.values for key in keys))

    def get(self, key):
        return self._answer(*self._read(key))

    def multi_get(self, keys):
        self.num_readings += 1
        values, sizes = zip(*map(self._read, keys), strict=True)
        return self._answer(list(values), sum(sizes))

    def _read(self, key):
        value = self.values[key]
        if key in self.alive:
            self.values[key] = json.dumps({**json.loads(value), "beats": json.loads(value)["beats"] + 1}).encode()
        return value, len(value)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(survey, "_POLL_SECONDS", 0.005)
    monkeypatch.setattr(survey, "SILENT_SECONDS", 0.05)  # in which the other ranks ask
    return Store()


def status(rank, beats=1, **values):
    return RankStatus(rank, beats, **values)


def ranks_write(store, world, without=()):
    for rank in set(range(world)) - set(without):
        Surveys(store, world, 60.0).write(status(rank))
    store.calls.clear()
    store.bytes.clear()


def all_ask(store, world, dead):
    """The verdict that each rank gets."""
    ranks, verdicts = set(range(world)) - {dead}, {}
    store.alive = set(map(str, ranks))
    store.barrier = threading.Barrier(len(ranks), timeout=10)

    def ask(rank):
        verdicts[rank] = Surveys(store, world, 60.0).ask()

    threads = [threading.Thread(target=ask, args=(rank,), name=f"rank {rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return list(verdicts.values())


@pytest.mark.parametrize("world", [8, 64])
def test_the_calls_of_a_rank_do_not_grow_with_the_number_of_ranks(store, world):
    ranks_write(store, world)
    verdicts = all_ask(store, world, dead=3)
    assert [found.gone.names() for found in verdicts] == ["rank 3"] * (world - 1)
    assert store.num_readings == 2
    # Each asks once, tries to lead, and polls while the leader looks for 0.05 s.
    assert max(store.calls.values()) <= 40, store.calls
    leader = max(store.bytes, key=store.bytes.__getitem__)
    assert sum(store.bytes.values()) - store.bytes[leader] <= 1000 * world


def test_a_rank_that_asks_after_a_survey_leads_the_next_one(store, monkeypatch):
    ranks_write(store, 3)
    monkeypatch.setattr(survey, "SILENT_SECONDS", 0.0)
    assert Surveys(store, 3, 60.0).ask().gone.count == 3
    store.alive = {"0", "1", "2"}
    for rank in range(3):  # they were paused
        Surveys(store, 3, 60.0).write(status(rank, 2))
    assert Surveys(store, 3, 60.0).ask().gone.count == 0


def test_a_late_rank_learns_who_died_first_and_not_who_ended_because_of_it(store):
    ranks_write(store, 4)
    store.alive = {"0", "1", "3"}
    assert Surveys(store, 4, 60.0).ask().gone.names() == "rank 2"
    store.alive = {"0"}  # rank 1 and 3 have said so, and ended
    assert Surveys(store, 4, 60.0).ask().gone.names() == "rank 2"


def test_a_leader_that_was_paused_does_not_bring_an_old_verdict_back(store):
    ranks_write(store, 3)
    store.add("begun", 2)
    Surveys(store, 3, 60.0)._lead(1)
    assert store.values["begun"] == b"2"


def test_another_rank_leads_if_the_leader_dies(store, monkeypatch):
    ranks_write(store, 3)
    monkeypatch.setattr(survey, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(survey, "_WAIT_SECONDS", 0.02)
    store.add("leader/1", 1)  # and dies before it says that it begins
    assert Surveys(store, 3, 60.0).ask().gone.count == 3
    store.add("leader/3", 1)
    store.set("begun", "3")  # and dies in its survey
    assert Surveys(store, 3, 60.0).ask().gone.count == 3 and store.values["begun"] == b"4"
    for number in (5, 6):
        store.add(f"leader/{number}", 1)
    assert Surveys(store, 3, 60.0).ask().gone.count == 3  # without a leader


def test_a_rank_that_never_wrote_is_gone_as_of_the_start(store):
    ranks_write(store, 4, without=[2])
    assert [found.gone.first for found in all_ask(store, 4, dead=2)] == [[RankStatus(2)]] * 3


def test_a_lost_store_means_that_rank_0_is_gone(store):
    class Gone:
        def call(self, function):
            raise RuntimeError("Connection reset by peer")

    found = Surveys(Gone(), 4, 60.0).ask()
    assert found.gone.names() == found.absent.names() == "rank 0" and not found.is_progressing


def test_ranks_that_are_behind_are_absent_and_progress_is_noticed():
    before = [status(rank) for rank in range(3)]
    waiting = {"beats": 2, "collectives": 9, "idle_seconds": 50.0}
    late = Survey.of(before, [status(0, **waiting), status(1, 2, collectives=8), status(2, **waiting)], 60.0)
    assert late.absent.names() == "rank 1" and late.gone.count == 0 and late.is_progressing
    saving = Survey.of(before, [status(0, **waiting), status(1, **waiting), status(2, save="writing", **waiting)], 60.0)
    assert saving.absent.names() == "rank 2" and not saving.is_progressing
    assert Survey.of(before, [status(rank, **waiting) for rank in range(3)], 60.0).absent.count == 3
    gone = Survey.of(before, [status(0), status(1, **waiting), status(2, **waiting)], 60.0)
    assert gone.gone == gone.absent and gone.absent.names() == "rank 0" and not gone.is_progressing


def test_a_verdict_of_thousands_stays_short_and_comes_back_as_it_was():
    statuses = [status(rank, host="machine") for rank in range(4096)]
    found = Survey.of(statuses, statuses, 60.0)
    assert found.gone.names().endswith("6, 7 and 4088 more")
    assert len(found.to_json()) < 5_000 and Survey.from_json(found.to_json()) == found
