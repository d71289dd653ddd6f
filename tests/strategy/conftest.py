"""This process as the only rank of a process group, so that models can be wrapped and sharded in it."""

import os

import pytest
import torch
from torch import nn

from kit.config.recipe import Recipe
from kit.strategy.accelerator import prepare, start
from kit.strategy.strategies import FSDP2
from kit.strategy.topology import Topology


@pytest.fixture
def alone_in_a_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def accelerate_starts_afresh(monkeypatch):
    """Accelerate keeps what it is in the process, and ``start`` sets threads and variables."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset():
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()

    before, threads = dict(os.environ), torch.get_num_threads()
    reset()
    yield
    reset()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, values):
        return self.inner(values)


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 2)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


@pytest.fixture
def model():
    """Two layers and a head, the first layer frozen."""
    torch.manual_seed(0)
    model = Model()
    model.layers[0].requires_grad_(False)
    return model


@pytest.fixture
def accelerator(accelerate_starts_afresh):
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture
def sharded(accelerate_starts_afresh, alone_in_a_group, monkeypatch, model):
    """Returns a function that shards the model with FSDP2 over this process alone, as a run with these flags does."""
    monkeypatch.setattr("kit.strategy.accelerator.join_group", lambda *_: None)

    def shard(mixed_precision="no", load_on_rank0=False, **flags):
        about = {"mixed_precision": mixed_precision, "load_on_rank0": load_on_rank0}
        topology = Topology(strategy=FSDP2, config_name="fsdp", num_processes=1, device_type="cpu", **about)
        recipe = Recipe(model_name_or_path="m", dataset="d", output_dir="o", **flags)
        accelerator, _ = start(recipe, topology)
        return prepare(accelerator, topology, model, torch.optim.SGD(model.parameters(), 0.1))

    return shard
