"""All checks of a machine run, in order; a model that cannot be opened takes none of the others with it."""

import errno
import sys
from types import SimpleNamespace

import pytest

from kit.config.command_line import read_command_line
from kit.config.recipe import RECIPES
from kit.strategy.launch import plan_launch
from kit.tools.doctor.machine import check_machine
from kit.tools.doctor.result import Report


@pytest.fixture
def checked(tmp_path):
    """The results for some flags, by name."""

    def checked(*words):
        report = Report(lambda result: None)
        check_machine(report, plan_launch(read_command_line([f"--output_dir={tmp_path}", *words])), None)
        return {result.name: result for result in report.results}

    return checked


def test_a_sound_machine_is_checked_from_driver_to_disk(checked):
    results = checked("--config", "ddp", "--num_processes", "2")
    names = ["launch", "file descriptors", "host name", "port", "driver", "bf16", "4-bit product", "model", "data"]
    assert list(results) == [*names, "wrap class", "GPUs", "attention", "memory", "disk"]
    assert {result.status for result in results.values()} <= {"ok", "warn"}
    assert results["launch"].found == "DDP, 2 processes, config ddp"


def test_a_model_that_is_not_there_is_one_failure(checked):
    results = checked("--model_name_or_path", "./nowhere", "--dataset", "nowhere.jsonl", "--max_length", "8")
    assert [result.name for result in results.values() if result.status == "fail"] == ["model", "data"]
    assert results["model"].found == "model_name_or_path: ./nowhere: no such folder; expected a folder with " + (
        "config.json, or a hub id"
    )
    assert results["memory and disk"].status == "warn"


def small_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 20))


def small_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("kit.tools.doctor.host.host_memory", lambda: (1 << 20, 1 << 20))


def few_file_descriptors(monkeypatch, tmp_path):
    monkeypatch.setattr("resource.getrlimit", lambda what: (64, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda what, limits: None)  # opening the data would lower this process's


def name_of_loopback(monkeypatch, tmp_path):
    monkeypatch.setattr("kit.strategy.network.address_of", lambda name: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    config = tmp_path / "two.yaml"
    config.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\nmain_process_ip: a\n")
    return ["--config", str(config)]


def port_is_taken(monkeypatch, tmp_path):
    def bind(self, address):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr("socket.socket.bind", bind)
    config = tmp_path / "taken.yaml"
    config.write_text("distributed_type: MULTI_GPU\nmain_process_port: 29511\n")
    return ["--config", str(config), "--num_processes", "2"]


def no_such_layer(monkeypatch, tmp_path):
    config = tmp_path / "layer.yaml"
    config.write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: QwenLayer}\n"
    )
    return ["--config", str(config), "--num_processes", "2"]


def hub_model_while_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return ["--model_name_or_path", "org/none", "--dataset", str(RECIPES / "tiny/train.jsonl")]


def broken_bitsandbytes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    return ["--optim", "adamw_8bit"]


def driver_that_is_too_old(monkeypatch, tmp_path):
    (tmp_path / "driver").write_text("Kernel Module  535.1 \n")
    monkeypatch.setattr("kit.tools.doctor.devices._NVIDIA", str(tmp_path / "driver"))


def bf16_that_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr("kit.tools.doctor.devices._BF16_ERROR", 0.0)
    return ["--config", "ddp", "--num_processes", "2"]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (small_disk, "disk"),
        (small_memory, "memory"),
        (few_file_descriptors, "file descriptors"),
        (name_of_loopback, "host name"),
        (port_is_taken, "port"),
        (no_such_layer, "wrap class"),
        (hub_model_while_offline, "model"),
        (broken_bitsandbytes, "4-bit product"),
        (driver_that_is_too_old, "driver"),
        (bf16_that_is_wrong, "bf16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_fault_of_a_machine_is_one_failed_check_with_a_fix(fault, name, checked, monkeypatch, tmp_path):
    """The faults of versions are in test_versions.py, those of ranks in test_ranks.py."""
    results = checked(*(fault(monkeypatch, tmp_path) or []))
    assert [result.name for result in results.values() if result.status == "fail"] == [name]
    assert results[name].fix


def test_too_few_gpus_fail_as_the_run_would(checked, monkeypatch):
    from kit.tools.doctor import devices
    from kit.tools.doctor.result import ok

    monkeypatch.setattr("kit.strategy.launch._devices", lambda strategy: (2, "cuda"))
    for name in ("check_driver", "check_bf16", "check_four_bit", "check_gpus", "check_attention"):
        monkeypatch.setattr(devices, name, lambda *args, name=name: ok(name, ""))
    results = checked("--config", "ddp", "--num_processes", "4")
    result = results["launch"]
    assert result.status == "fail" and "4 on a machine with 2 GPUs; expected at most 2" in result.found
    assert results["batch"].fix == "--per_device_train_batch_size 8: the same maths"


def test_a_config_for_several_machines_says_how_to_check_them_all(checked, tmp_path, monkeypatch):
    config = tmp_path / "two.yaml"
    config.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: 10.7.0.1\n"
        "mixed_precision: 'no'\n"
    )
    monkeypatch.setattr("sys.argv", ["/bin/kit", "doctor", "--config", str(config)])
    results = checked("--config", str(config))
    assert results["launch"].status == "warn"
    command = f"accelerate launch --config_file {config} --machine_rank N -m kit.cli.main doctor --config {config}"
    assert command in results["launch"].fix
    config.write_text(config.read_text().replace("10.7.0.1", "127.0.0.1"))
    results = checked("--config", str(config))
    assert results["host name"].status == "fail" and "127.0.0.1" in results["host name"].found
    config.write_text(config.read_text().replace("main_process_ip: 127.0.0.1\n", ""))
    assert "main_process_ip: missing" in checked("--config", str(config))["launch"].found
