"""A recipe, a topology and a planned run, with other values where a test asks for them."""

import os
from unittest.mock import patch

import pytest

from kit.config.command_line import read_recipe
from kit.strategy.strategies import DDP
from kit.strategy.topology import Topology


@pytest.fixture(autouse=True)
def environment():
    """A command sets variables for the libraries that it imports."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def recipe():
    """The recipe tiny, with an output folder."""
    return read_recipe([]).model_copy(update={"output_dir": "runs/tiny-ddp"})


@pytest.fixture
def topology():
    def topology(**changes):
        values = {"strategy": DDP, "config_name": "ddp", "num_processes": 2, "mixed_precision": "bf16"}
        return Topology(**({**values, "device_type": "cpu", "cpu_dry_run": True} | changes))

    return topology
