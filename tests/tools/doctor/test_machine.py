"""What stops a run on a machine is named, one fault at a time; a model that cannot be opened takes no other check."""

from types import SimpleNamespace

import pytest
import torch
from helpers import with_gpus

from kit.config.command_line import read_command_line
from kit.config.recipe import RECIPES
from kit.errors import Problem, UserError
from kit.strategy.launch import plan_launch
from kit.tools.doctor import machine
from kit.tools.doctor.machine import check_bf16, check_data, check_driver, check_gpus, check_machine
from kit.tools.doctor.result import Report

NAMES = ["launch", "driver", "bf16", "model", "data", "GPUs"]


@pytest.fixture
def checked(tmp_path):
    """The results for some flags, by name."""

    def checked(*words):
        report = Report(lambda result: None)
        check_machine(report, plan_launch(read_command_line([f"--output_dir={tmp_path}", *words])), None)
        return {result.name: result for result in report.results}

    return checked


def test_a_sound_machine_is_checked_from_launch_to_disk(checked):
    results = checked("--config", "ddp", "--num_processes", "2")
    assert list(results) == [*NAMES, "memory", "disk"]
    assert {result.status for result in results.values()} <= {"ok", "warn"}
    assert results["launch"].found == "DDP, 2 processes, config ddp"


def test_a_model_that_is_not_there_is_one_failure(checked):
    results = checked("--model_name_or_path", "./nowhere", "--dataset", "nowhere.jsonl", "--max_length", "8")
    assert [result.name for result in results.values() if result.status == "fail"] == ["model", "data"]
    assert results["model"].found == "model_name_or_path: ./nowhere: no such folder; expected a folder with " + (
        "config.json, or a hub id"
    )
    assert "there is no model" in results["memory and disk"].found


def test_one_fault_of_a_machine_is_one_failed_check_with_a_fix(checked, monkeypatch, tmp_path):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    (tmp_path / "driver").touch()
    offline = ["--model_name_or_path", "org/none", "--dataset", str(RECIPES / "tiny/train.jsonl")]
    for name, found, words, faults in (
        ("disk", "1.0 MiB free", [], {"shutil.disk_usage": lambda folder: SimpleNamespace(free=1 << 20)}),
        ("memory", "1.0 MiB free", [], {"kit.tools.doctor.machine.host_memory": lambda: (1 << 20, 1 << 20)}),
        (
            "model",
            "not in the cache; HF_HUB_OFFLINE forbids",
            offline,
            {"huggingface_hub.constants.HF_HUB_OFFLINE": True},
        ),
        (
            "driver",
            "The NVIDIA driver on your system is too old",
            [],
            {
                "kit.tools.doctor.machine._NVIDIA": str(tmp_path / "driver"),
                "torch.cuda.init": too_old,
                "torch.cuda.is_available": lambda: False,
            },
        ),
    ):
        with monkeypatch.context() as patched:
            for target, fault in faults.items():
                patched.setattr(target, fault)
            results = checked(*words)
        assert [result.name for result in results.values() if result.status == "fail"] == [name]
        assert found in results[name].found and results[name].fix


def test_a_gpu_without_bf16_is_named(topology, monkeypatch):
    with_gpus(monkeypatch, ("T4", 7))
    result = check_bf16(topology(device_type="cuda"), "ddp")
    assert result.status == "fail" and "bf16, which T4 does not have" in result.found and result.fix
    result = check_bf16(topology(device_type="cuda", mixed_precision="no"), None)
    assert result.status == "warn" and "T4 has no bf16" in result.found


def test_gpus_hold_what_the_plan_says(topology, monkeypatch):
    on_gpus = topology(device_type="cuda", rehearsal=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "gpu_memory", lambda topology: 80 << 30)
    assert check_gpus(on_gpus, None).found == "2 of 80.00 GiB" and "reaches 2 GPUs" in check_driver(on_gpus).found
    refused = [Problem("memory", "the run needs about 90.0 GiB of each GPU", fix="--gradient_checkpointing true")]
    monkeypatch.setattr(machine, "memory_problems", lambda workload, topology: refused)
    result = check_gpus(on_gpus, None)
    assert result.status == "fail" and "90.0 GiB" in result.found and "checkpointing" in result.fix


def test_a_config_for_several_machines_says_how_to_check_them_all(checked, tmp_path, monkeypatch):
    config = tmp_path / "two.yaml"
    config.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: 10.7.0.1\n"
        "mixed_precision: 'no'\n"
    )
    result = checked("--config", str(config))["launch"]
    assert result.status == "warn" and "of 2 machines only this one is checked" in result.found
    config.write_text(config.read_text().replace("main_process_ip: 10.7.0.1\n", ""))
    assert "main_process_ip: missing" in checked("--config", str(config))["launch"].found


def test_local_data_asks_no_hub(recipe, monkeypatch):
    monkeypatch.setattr(machine, "ask_hub", lambda name, flag, revision: pytest.fail("asked"))
    result = check_data({"dataset": recipe.dataset_entries})
    assert result.status == "ok" and "train.jsonl" in result.found and "http" not in result.found


def test_data_of_the_hub_are_asked_for_once_or_looked_for_in_the_cache(recipe, monkeypatch):
    remote = recipe.model_copy(update={"dataset": "org/data", "eval_dataset": None})
    asked = []
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(machine, "ask_hub", lambda name, flag, revision: asked.append((name, flag)))
    assert check_data({"dataset": remote.dataset_entries}).status == "ok" and asked == [("org/data", "dataset")]

    def gated(name, flag, revision):
        raise UserError(Problem(flag, f"{name}: its licence is not accepted", fix="log in: `hf auth login`"))

    monkeypatch.setattr(machine, "ask_hub", gated)
    result = check_data({"dataset": remote.dataset_entries})
    assert result.status == "fail" and "licence" in result.found and "hf auth login" in result.fix
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(machine, "cached", lambda kind: ["org/other"])
    assert "not in the cache" in check_data({"dataset": remote.dataset_entries}).found
    monkeypatch.setattr(machine, "cached", lambda kind: ["org/data"])
    assert check_data({"dataset": remote.dataset_entries}).status == "ok"
