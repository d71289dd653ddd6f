"""Two statuses of each rank show who exited, and for whom the others wait."""

import json
from dataclasses import replace

from kit.failures import survey
from kit.failures.survey import RankStatus, Survey, last_seen, names, take_survey


def statuses(count, **values):
    return [RankStatus(rank, heartbeats=1, idle_seconds=99, host="a", **values) for rank in range(count)]


def beaten(before):
    return [replace(status, heartbeats=status.heartbeats + 1) for status in before]


def test_silent_ranks_are_missing_and_else_the_others_wait_for_those_behind_or_saving():
    before = statuses(4, collectives=7)
    after = beaten(before)
    assert Survey.of(before, after, 100).missing == after  # all wait
    after[2] = before[2]
    assert Survey.of(before, after, 100).silent == Survey.of(before, after, 100).missing == [before[2]]
    after = beaten(before)
    after[1] = replace(after[1], collectives=6)
    assert Survey.of(before, after, 100).missing == [after[1]] and not Survey.of(before, after, 100).silent
    after[1] = replace(after[1], collectives=7, save="writing its shard")
    assert Survey.of(before, after, 100).missing == [after[1]]
    assert not Survey.of(before, after, 100).is_progressing
    after[3] = replace(after[3], idle_seconds=3)
    assert Survey.of(before, after, 100).is_progressing


def test_many_ranks_are_listed_in_short():
    assert names(statuses(600)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 592 others"
    assert last_seen(statuses(4, step=4)[3:], "b") == "rank 3 on a starting in step 4"


class Store:
    """A key-value store in which rank 0 has heartbeats, and rank 1 has never written."""

    def __init__(self):
        self.heartbeats = 0

    def call(self, function):
        return function(self)

    def check(self, keys):
        return keys == ["0"]

    def get(self, key):
        self.heartbeats += 1
        return json.dumps({"rank": 0, "heartbeats": self.heartbeats}).encode()


def test_a_rank_that_never_wrote_a_status_is_silent(monkeypatch):
    monkeypatch.setattr(survey, "SILENT_SECONDS", 0)
    assert take_survey(Store(), 2, 100).silent == [RankStatus(1)]
