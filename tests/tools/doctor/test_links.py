"""A link that is far too slow for the planned run is a warning, with seconds of a step."""

import torch

from kit.config.command_line import read_command_line
from kit.strategy.launch import plan_launch
from kit.strategy.strategies import Strategy
from kit.strategy.topology import Topology
from kit.tools.doctor import collectives, links
from kit.tools.doctor.collectives import check_collective
from kit.tools.doctor.links import check_step

CPU = torch.device("cpu")


def checked(rate, **flags):
    topology = Topology(
        config_name="ddp", strategy=Strategy("ddp"), num_processes=2, mixed_precision="no", device_type="cpu"
    )
    recipe = plan_launch(read_command_line([f"--{key}={value}" for key, value in flags.items()])).recipe
    return check_step(recipe, topology, CPU, 0.001, rate)


def test_a_fast_link_is_fine_and_a_slow_one_a_warning_with_the_seconds_of_a_step(monkeypatch):
    monkeypatch.setattr(links, "_operations_per_second", lambda device, dtype: 1e11)
    assert checked(1e12).status == "ok"
    slow = checked(125_000)  # 1 Mbit/s; DDP sends 4 bytes of each of 0.9 million gradients once over the link
    assert slow.status == "warn" and slow.fix == "--method lora exchanges gradients of adapters only"
    assert 25 < float(slow.found.split("about ")[1].split(" s")[0]) < 35
    assert "a faster network" in checked(1250, method="lora").fix


def test_sizes_beyond_one_that_is_slow_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "SLOW_SECONDS", -1.0)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        stages = []
        result = check_collective("broadcast", CPU, stages.append)
    finally:
        torch.distributed.destroy_process_group()
    assert stages == ["in broadcast of 4 KiB"] and "larger ones left out as slow" in result.found
