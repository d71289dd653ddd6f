"""``--profile_steps`` writes what the first steps of a start do, and changes nothing else."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from kit.run.profile import WARM_UP_STEPS, profiled


def run(tmp_path, num_steps, steps, is_main=True, stop_at=None):
    """Call a step of one matrix product for each of ``steps``; it is stopped at ``stop_at``."""
    calls = iter(steps)

    def step(size):
        torch.ones(size, size) @ torch.ones(size, size)
        return SimpleNamespace(stop=next(calls) == stop_at)

    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=is_main)
    made = profiled(step, accelerator, num_steps, steps, tmp_path)
    for number in steps:
        if made(8).stop:
            assert number == stop_at
            break
    return made is step


def products(tmp_path, first):
    """How many matrix products the trace has."""
    text = gzip.decompress((tmp_path / f"profile/step-{first:08d}-rank0.json.gz").read_bytes())
    return [event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op"].count(
        "aten::mm"
    )


@pytest.mark.parametrize(
    ("flags", "first", "traced"),
    [
        ({"num_steps": 2, "steps": range(40, 50)}, 43, 2),  # of a run that continues
        ({"num_steps": 3, "steps": range(9), "stop_at": 3}, 3, 2),  # a signal came
    ],
)
def test_the_steps_after_the_first_two_of_a_start_are_traced(tmp_path, capsys, flags, first, traced):
    assert not run(tmp_path, **flags)
    assert products(tmp_path, first) == traced
    assert f"profile from step {first} on: {tmp_path}/profile/step-" in capsys.readouterr().out
    assert "aten::mm" in (tmp_path / "profile/operations.txt").read_text()


def test_without_steps_to_profile_and_on_other_ranks_the_step_is_called_as_it_is(tmp_path, capsys):
    assert run(tmp_path, 0, range(4)) and run(tmp_path, 2, range(4), is_main=False)
    assert not capsys.readouterr().out and not list(tmp_path.iterdir())
    assert run(tmp_path, 1, range(WARM_UP_STEPS))
    assert "warning: --profile_steps: 2 steps are left, and the first 2 are not profiled" in capsys.readouterr().out
