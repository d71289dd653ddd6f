"""A rank that exits or hangs ends the run soon, by name; no process stays."""

import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from helpers import ROOT, matrix

from kit.failures.watch import Watch

pytestmark = pytest.mark.slow
DEADLINE = 60  # seconds; on a machine that does nothing else it takes less than 30
SCRIPT = str(ROOT / "recipes/finetune.py")


class Launched:
    """The script under a launcher, with its ranks as processes that can be signalled."""

    def __init__(self, finetune, launcher, **flags):
        self.folder = finetune.folder / "run"
        flags = {**finetune.defaults, "output_dir": self.folder, **flags}
        self.log = finetune.folder / f"launched-{time.monotonic_ns()}.log"
        command = [sys.executable, *launcher, SCRIPT, *(f"--{name}={value}" for name, value in flags.items())]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.seen = {}

    def ranks(self):
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "RANK" in child.environ()]

    def rank(self, number):
        return next(rank for rank in self.ranks() if rank.environ()["RANK"] == str(number))

    def wait_for_steps(self, steps, seconds=120):
        end = time.monotonic() + seconds
        path = self.folder / "metrics.jsonl"
        while not path.exists() or path.read_text().count('"loss"') < steps:
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.05)
        self.seen |= {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}

    def wait(self, seconds):
        """Status and seconds until the launcher and every rank are gone."""
        start = time.monotonic()
        status = self.process.wait(seconds)
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=max(0, start + seconds - time.monotonic()))
        assert not alive, self.text
        return status, time.monotonic() - start

    @property
    def text(self):
        return self.log.read_text()


@pytest.fixture
def launch(finetune):
    started = []

    def launch(launcher=(), **flags):
        started.append(Launched(finetune, launcher, **flags))
        return started[-1]

    yield launch
    for one in started:
        one.process.kill()
        for child in one.seen.values():
            if child.is_running():
                child.kill()


@pytest.mark.parametrize(("config", "victim"), matrix([("ddp", 1), ("fsdp", 1)], rest=[("ddp", 0)]))
def test_a_killed_rank_ends_the_run_soon_by_name(launch, config, victim):
    run = launch(config=config, num_processes=2, max_steps=5000)
    run.wait_for_steps(3)
    run.rank(victim).kill()
    status, seconds = run.wait(DEADLINE)
    assert status != 0
    assert f"error: rank {1 - victim}: rank {victim} exited, last seen: rank {victim} " in run.text, run.text
    print(f"{config}, rank {victim} killed: {seconds:.1f} s")


@pytest.mark.parametrize(("config", "victim"), matrix([("fsdp", 1)], always=0, rest=[("ddp", 1), ("ddp", 0)]))
def test_a_hung_rank_ends_the_run_after_the_time_out_by_name(launch, config, victim):
    run = launch(config=config, num_processes=2, max_steps=5000, ddp_timeout=10)
    run.wait_for_steps(3)
    run.rank(victim).send_signal(signal.SIGSTOP)
    status, seconds = run.wait(DEADLINE)
    assert status != 0
    found = rf"error: rank {1 - victim}: 10 s without progress \(--ddp_timeout\), (training|reading data) in step \d+; "
    assert re.search(found + rf"rank {victim} never reached the collective, last seen: rank {victim} ", run.text), (
        run.text
    )
    print(f"{config}, rank {victim} stopped: {seconds:.1f} s")


@pytest.mark.long
def test_restarted_ranks_delete_nothing_and_name_the_command(launch):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"]
    run = launch(launcher, config="ddp", max_steps=5000, save_steps=5, overwrite_output_dir="true")
    run.wait_for_steps(8)
    run.rank(1).kill()
    assert run.wait(DEADLINE)[0] != 0
    assert "--max_restarts: the launcher restarted these ranks" in run.text, run.text
    assert list((run.folder / "checkpoints").glob("step-*/manifest.json"))


class Cut:
    """A store behind a cable that was pulled."""

    address = "10.0.0.1:29500"

    def call(self, function):
        raise TimeoutError


def test_a_store_that_does_not_answer_is_reported_with_its_address():
    accelerator = SimpleNamespace(process_index=1, num_processes=2)
    never = float("inf")  # a watch that lost its store would end this process
    error = Watch(accelerator, Cut(), timeout_seconds=never).explain(RuntimeError("Connection closed by peer"))
    assert str(error).startswith("the rendezvous store at 10.0.0.1:29500 does not answer ")
    assert "the same command resumes from the last checkpoint" in str(error)
    scoring = Watch(accelerator, Cut(), timeout_seconds=never, trains=False).explain(RuntimeError("Connection closed"))
    assert "checkpoint" not in str(scoring)
