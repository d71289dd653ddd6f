"""A meter learns what the storages of a run are, also those that appear while it trains."""

from types import SimpleNamespace

import torch

from kit.tools.plan.labels import BACKWARD, label_storages
from kit.tools.plan.meter import Meter


def test_weights_gradients_and_optimiser_state_have_their_names():
    frozen, trained = torch.nn.Linear(8, 8, bias=False).requires_grad_(False), torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.Sequential(frozen, trained)
    optimizer = torch.optim.AdamW(trained.parameters())
    accelerator = SimpleNamespace(backward=lambda loss: loss.backward())
    meter = Meter()
    label_storages(meter, SimpleNamespace(model=model, optimizer=optimizer, accelerator=accelerator))
    for _ in range(2):
        with meter, meter.tally() as tally:
            accelerator.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
    parts = tally.components["cpu"]
    assert parts["frozen weights"] == parts["trainable weights"] == parts["gradients"] == 256
    assert parts["optimiser"] == 512 + 4  # two moments, and the number of steps
    assert tally.moments["cpu"][BACKWARD]["optimiser"] == 516
