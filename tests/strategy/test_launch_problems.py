"""What contradicts a launch, or is absent from a config for several machines, is reported before any start."""

import sys
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.strategy import launch_problems, network
from kit.strategy.accelerate_config import AccelerateConfig
from kit.strategy.strategies import DDP, SINGLE

TWO = AccelerateConfig(
    strategy=DDP,
    mixed_precision="no",
    num_processes=8,
    num_machines=2,
    use_cpu=False,
    layer_classes=(),
    reshard_after_forward=True,
    load_on_rank0=False,
    main_process_ip="gpu-a",
)


@pytest.fixture(autouse=True)
def address(monkeypatch):
    monkeypatch.setattr(network, "address_of", lambda name: "10.0.0.1")


def test_what_a_config_for_two_machines_lacks_is_reported():
    cases = [
        ({}, []),
        ({"main_process_ip": None}, ["main_process_ip: missing"]),
        ({"num_processes": 7}, ["num_processes: 7 over 2 machines"]),
        ({"num_processes": 16}, ["num_processes: 8 on a machine with 4 GPUs; expected at most 8 over 2 machines"]),
        ({"strategy": SINGLE}, ["num_machines: 2 machines with a single-process config"]),
        ({"num_processes": 7, "main_process_ip": None}, ["num_processes: 7 over", "main_process_ip: missing"]),
    ]
    for case in cases:
        changes, expected = case
        settings = replace(TWO, **changes)
        problems = launch_problems._machine_problems(settings, settings.num_processes, 4)
        assert len(problems) == len(expected), case
        assert all(str(problem).startswith(text) for problem, text in zip(problems, expected, strict=True)), case


def test_a_main_address_of_loopback_is_refused(monkeypatch):
    monkeypatch.setattr(network, "address_of", lambda name: "127.0.1.1")
    assert "gpu-a means 127.0.1.1" in str(launch_problems._machine_problems(TWO, 8, 4)[0])


def test_a_command_of_the_kit_is_a_module_to_a_launcher(monkeypatch):
    for path, words in (("/env/bin/kit", "-m kit.cli.main"), (str(ROOT / "kit/cli/main.py"), "-m kit.cli.main")):
        monkeypatch.setattr(sys, "argv", [path])
        assert launch_problems._script() == words
    monkeypatch.setattr(sys, "argv", ["my recipes/finetune.py"])
    assert launch_problems._script() == "'my recipes/finetune.py'"
