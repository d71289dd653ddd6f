"""Collectives are checked for their values; gradients are those of all ranks' samples."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from kit.tools.doctor import collectives
from kit.tools.doctor.collectives import COLLECTIVES, TinyModel, check_collective, check_gradients, samples

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path):
    """This process as the only rank of a group."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_run_at_each_size_and_timed(name, alone, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (1 << 12, 1 << 13))
    stages = []
    result = check_collective(name, CPU, stages.append)
    assert result.status == "ok" and result.found.endswith("GB/s")
    assert stages == [f"in {name} of 4 KiB", f"in {name} of 8 KiB"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_value_fails(name, alone, monkeypatch):
    collective = COLLECTIVES[name]

    def damaged(values, rank, world):
        result, expected = collective.run(values, rank, world)
        result.view(-1)[-1] += 1
        return result, expected

    monkeypatch.setitem(COLLECTIVES, name, collective._replace(run=damaged))
    assert check_collective(name, CPU, print).found == "wrong values at 4 KiB"


def prepared(world):
    """Rank 0 of ``world``, without any synchronisation."""
    accelerator = SimpleNamespace(
        process_index=0,
        num_processes=world,
        device=CPU,
        backward=lambda loss: loss.backward(),
        gradient_state=SimpleNamespace(plugin_kwargs={}),
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    )
    return SimpleNamespace(accelerator=accelerator, model=TinyModel(), strategy=SimpleNamespace(mixed_precision="bf16"))


def test_the_gradient_of_one_rank_alone_is_that_of_one_process():
    assert check_gradients(prepared(1), list).status == "ok"


@pytest.mark.parametrize("world", [2, 8])
def test_gradients_that_are_not_synchronised_are_reported_by_rank(world):
    result = check_gradients(prepared(world), lambda norms: norms * world)
    assert result.status == "fail" and f"on rank {', '.join(map(str, range(world)))}: norm" in result.found


def test_ranks_have_different_samples_and_the_same_model():
    assert not torch.equal(samples(0), samples(1))
    assert torch.equal(TinyModel().head.weight, TinyModel().head.weight)
