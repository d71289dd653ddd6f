"""This process as the only rank of a process group, so that models can be wrapped and sharded in it."""

import os

import pytest
import torch
from torch import nn


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
