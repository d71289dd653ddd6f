"""Ranks that do not answer, differ or learn apart are named, in time. Each fault is put into real ranks on gloo."""

import os
import signal
import time

import pytest
from helpers import matrix, run_ranks

from kit.tools.doctor import collectives, hosts
from kit.tools.doctor.ranks import Deadline, hard_limit

SECONDS = 10  # within which ranks must come, also on a machine that has other work


def never_joins(rank):
    if rank == 1:
        time.sleep(600)


def stops_in_a_collective(rank):
    collective = collectives.COLLECTIVES["reduce-scatter"]

    def stopped(*args):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return collective.run(*args)

    collectives.COLLECTIVES["reduce-scatter"] = collective._replace(run=stopped)


def dies_in_a_collective(rank):
    collective = collectives.COLLECTIVES["broadcast"]

    def dying(*args):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return collective.run(*args)

    collectives.COLLECTIVES["broadcast"] = collective._replace(run=dying)


def has_another_version(rank):
    own = hosts.machine_versions
    hosts.machine_versions = lambda: own() | ({"kit": "0.0.9", "peft": "0.1"} if rank == 1 else {})


def does_not_synchronise(rank):
    def apart(accelerator, model, is_last):
        return accelerator.no_sync(model)

    collectives.accumulating = apart


def nothing(rank):
    pass


def visit(tmp_path, fault, config="ddp"):
    """Status of rank 0, and what all ranks said."""
    log = tmp_path / "log"
    words = ["doctor", f"--config={config}", f"--timeout={SECONDS}", f"--output_dir={tmp_path}"]
    run_ranks("../kit/cli/main", words, 2, log, deadline_seconds=hard_limit(SECONDS) + 60, prepare=fault)
    return int(log.with_suffix(".status").read_text()), log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("config", matrix(["ddp", "fsdp"]))
def test_sound_ranks_pass(config, tmp_path):
    status, text = visit(tmp_path, nothing, config)
    assert status == 0 and "0 fail" in text, text
    for line in (
        "ok    ranks             2 on 1 machine",
        "ok    machines ",
        "ok    reduce-scatter ",
        "ok    gradients ",
    ):
        assert f"\n{line}" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reported"),
    matrix(
        [
            (
                never_joins,
                "rank 0: not all 2 processes came within 10.0 s (--timeout): rank 1 did not come",
            ),
            (
                stops_in_a_collective,
                "without progress (--timeout), in reduce-scatter of 4 KiB; rank 1 did not arrive, last seen: ",
            ),
            (
                dies_in_a_collective,
                "fail  broadcast         rank 0: rank 1 is gone, last seen: rank 1 in ",
            ),
            (has_another_version, "fail  machines          kit 0.0.9 on rank 1, 0.1.0 on rank 0; peft 0.1 on rank 1"),
            (does_not_synchronise, "fail  gradients         not those of all ranks' samples on rank 0, 1: norm "),
        ],
        always=2,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_a_rank_is_named_in_time_with_status_2(fault, reported, tmp_path):
    status, text = visit(tmp_path, fault)
    assert reported in text, text
    assert status == 2 and "Traceback" not in text
    assert text.count(" checks in ") == 1


def test_a_process_ends_at_the_hard_limit_whatever_it_waits_for(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    Deadline(0.01, lambda message: [message, 2])
    end = time.monotonic() + 5
    while not ended and time.monotonic() < end:
        time.sleep(0.005)
    assert ended == [["no end after 0 s", 2]]
    done = Deadline(60, lambda message: 2)
    done.cancel()
    done._timer.join(5)  # long before its limit
    assert not done._timer.is_alive() and len(ended) == 1
    assert hard_limit(10) == 90
