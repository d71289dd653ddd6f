"""Rollouts that a vLLM server writes one step ahead: by which weights, beside what, and where a run ends and continues.

The server is a stand-in (tests/fake_vllm.py) over the same weights.
"""

import os
import random
import signal
import time
from functools import partial

import pytest
from fake_vllm import FLAGS, TINY, FakeVllm
from helpers import matrix, signal_in_step

pytestmark = pytest.mark.slow

PROMPTS = 2  # of a rollout, with 4 completions each
PROVING = 8  # tokens of completions that prove weights; those of rollouts are longer
OVERLAP = FLAGS | {
    "rollout_overlap": True,
    "num_iterations": 1,
    "max_new_tokens": 10,
    "save_steps": 1,
    "async_save": False,  # so that a step that was done is saved
}
ENGAGED = """
import os, time

def engaged(expected, answer, row):
    "Wait until the server was asked for the next rollout, except in the last one."
    file = os.open({calls!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"x")
    rollout = (os.lseek(file, 0, os.SEEK_CUR) - 2) // 8  # the first call is of the check before the run
    while 0 <= rollout < 3 and os.path.getsize({asked!r}) < 2 * (rollout + 2):
        time.sleep(0.02)
    return sum(map(ord, answer)) % 97 / 97
"""


@pytest.fixture
def trained(finetune, fp32, monkeypatch, request):
    """Train with a server that has these arguments."""

    def train(name, config="single", server=None, **changes):
        server = FakeVllm(TINY / "model", **server or {})
        request.addfinalizer(server.close)
        flags = {"config": fp32[config], "vllm_server_base_url": server.url}
        return finetune(name, **OVERLAP | flags | changes), server

    train.folder = finetune.folder
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    return train


def trained_weights(run):
    return [path.read_bytes() for path in sorted((run.folder / "final").glob("*.safetensors"))]


def test_a_rollout_is_by_the_weights_of_one_step_before_and_neither_rewards_nor_the_step_hold_it(trained, tmp_path):
    """A reward ends once the next rollout was asked for; that is answered once the step has ended."""
    asked, calls, own = tmp_path / "asked", tmp_path / "calls", tmp_path / "own.py"
    asked.touch()
    own.write_text(ENGAGED.format(asked=str(asked), calls=str(calls)))
    rows, late = tmp_path / "whole/metrics.jsonl", []

    def hold(body):
        if body["max_tokens"] == PROVING:
            return
        rollout = asked.stat().st_size // PROMPTS
        with asked.open("a") as file:
            file.write("x")
        end = time.monotonic() + 60
        while rollout and rows.read_text().count('"grad_norm"') < rollout:
            if time.monotonic() > end:
                late.append(rollout)
                break
            time.sleep(0.02)

    run, server = trained("whole", server={"hold": hold}, rewards=f"{own}:engaged", reward_timeout=60)
    assert run.status == 0 and not late and "reward engaged failed" not in run.output, run.output
    bodies = [body for path, body in server.requests if path == "/v1/completions"]
    by = {
        is_proof: [int(body["model"][5:13]) for body in bodies if (body["max_tokens"] == PROVING) == is_proof]
        for is_proof in (False, True)
    }
    assert by[False] == [0, 0, 0, 0, 1, 1, 2, 2] and sorted({*by[True]}) == [1, 2, 3], by
    assert [name[:13] for name in server.loaded()] == [f"step-{step:08d}" for step in range(4)]
    assert all(row["sampling/logp_difference/max"] < 1e-5 for row in run.rows), run.rows
    # The ratio is that to the weights that wrote it: the first rollout's are its own.
    assert [row["log_ratio"] > 1e-4 for row in run.rows] == [False, True, True, True], run.rows


def wait_at_random(body):
    time.sleep(random.random())


WAYS = [
    ("single", 1, {"dynamic_sampling": True, "num_iterations": 2, "vllm_importance_sampling_cap": 2, "max_steps": 6}),
    ("fsdp", 2, {"policy_loss": "gspo", "beta": 0.1}),
    ("ddp", 2, {"policy_loss": "rloo", "beta": 0.1, "method": "full", "adapter_name_or_path": None}),
]


@pytest.mark.parametrize(("config", "processes", "changes"), matrix([("single", 1, {}), ("ddp", 2, {})], rest=WAYS))
def test_a_run_depends_on_no_moment_at_which_its_server_answers_or_it_ends(trained, config, processes, changes):
    ways = {"config": config, "processes": processes, "per_device_train_batch_size": 4 // processes, **changes}
    whole, _ = trained("whole", **ways)
    assert whole.status == 0, whole.output
    slow = {"hold": wait_at_random}
    for name, sent, status in (("stopped", signal.SIGTERM, 75), ("killed", signal.SIGKILL, -9)):
        ended, _ = trained(name, server=slow, prepare=partial(signal_in_step, 3, sent, 0), **ways)
        assert ended.status == status, ended.output
        again, other = trained(name, server=slow, **ways)
        assert again.status == 0 and again.losses == whole.losses, again.output
        assert "continuing after step" in again.output and trained_weights(again) == trained_weights(whole)
        columns = ("reward", "log_ratio", "sampling/logp_difference/mean")
        assert [[row[key] for key in columns] for row in again.rows] == [
            [row[key] for key in columns] for row in whole.rows
        ]
        assert not {name[:13] for name in other.loaded()} & {"step-00000000", "step-00000001"}


def test_weights_that_did_not_arrive_are_refused_and_what_was_written_before_them_is_kept(trained):
    flags = {"max_steps": 2, "save_steps": 9}
    run, _ = trained("stale", server={"keeps_stale": True}, **flags)
    assert run.status == 2 and "after publishing step-00000001-" in run.output, run.output
    run, server = trained("stale", **flags)
    assert run.status == 0 and run.rows[1]["log_ratio"] > 1e-4, run.output
    assert {body["max_tokens"] for path, body in server.requests if path == "/v1/completions"} == {PROVING}


@pytest.mark.long
def test_a_stop_does_not_wait_for_a_server_that_is_away(trained):
    def stop(ranks):
        if is_away := (rows.exists() and '"grad_norm"' in rows.read_text()):
            os.kill(ranks[0].pid, signal.SIGTERM)
        return is_away

    rows = trained.folder / "waits/metrics.jsonl"
    run, server = trained("waits", server={"loses_at": 3, "away_seconds": 600}, meanwhile=stop, vllm_server_timeout=500)
    assert server.away and run.status == 75 and "after step 1 of 4" in run.output, run.output
    run, server = trained("waits")
    assert run.status == 0 and run.rows[1]["log_ratio"] < 1e-6 < run.rows[2]["log_ratio"], run.output
