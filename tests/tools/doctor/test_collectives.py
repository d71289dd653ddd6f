"""Ranks that hang, differ or sum wrongly are named in time. Each fault is injected into real ranks on gloo."""

import os
import signal
import time

import pytest
from helpers import matrix, run_ranks
from torch import distributed

from kit.run import facts

SECONDS = 10  # within which ranks must come, also on a machine that has other work
all_reduce = distributed.all_reduce


def nothing(rank):
    pass


def never_joins(rank):
    if rank == 1:
        time.sleep(600)


def is_stopped_in_the_all_reduce(rank):
    def stopped(values):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce(values)

    distributed.all_reduce = stopped


def dies_in_the_all_reduce(rank):
    def dying(values):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(values)

    distributed.all_reduce = dying


def adds_up_wrongly(rank):
    def damaged(values):
        all_reduce(values)
        values[-1] += rank

    distributed.all_reduce = damaged


def has_another_version(rank):
    own = facts.versions()
    facts.versions = lambda: own | ({"peft": "0.1"} if rank == 1 else {})


def visit(tmp_path, fault):
    """Status of rank 0, and what all ranks said."""
    log = tmp_path / "log"
    words = ["doctor", "--config=ddp", f"--timeout={SECONDS}", f"--output_dir={tmp_path}"]
    run_ranks("../kit/cli/main", words, 2, log, deadline_seconds=180, prepare=fault)
    return int(log.with_suffix(".status").read_text()), log.read_text()


@pytest.mark.slow
def test_sound_ranks_pass(tmp_path):
    status, text = visit(tmp_path, nothing)
    assert status == 0 and "0 fail" in text, text
    assert "\nok    ranks             2 joined" in text and "\nok    all-reduce        32 MiB in " in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reported"),
    matrix(
        [
            (
                never_joins,
                "rank 0: not all 2 processes joined within 10.0 s (--timeout): rank 1 did not join",
            ),
            (
                is_stopped_in_the_all_reduce,
                "without progress (--timeout), in all-reduce; rank 1 never reached the collective, last seen: ",
            ),
            (dies_in_the_all_reduce, "fail  all-reduce        rank 0: rank 1 exited, last seen: rank 1 "),
            (adds_up_wrongly, "fail  all-reduce        rank 1: 1 of 8,388,608 sums are wrong"),
            (has_another_version, "fail  ranks             peft: "),
        ],
        always=1,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_a_rank_is_named_in_time_with_status_2(fault, reported, tmp_path):
    status, text = visit(tmp_path, fault)
    assert reported in text, text
    assert status == 2 and "Traceback" not in text
    assert text.count(" checks: ") == 1
