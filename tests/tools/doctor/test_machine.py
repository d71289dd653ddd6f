"""Faults of a machine are named, one at a time; a model that cannot be opened blocks no other check."""

import re
from types import SimpleNamespace

import pytest

from kit.config.command_line import read_command_line
from kit.config.paths import RECIPES
from kit.strategy.launch.launch import plan_launch
from kit.tools.doctor import machine
from kit.tools.doctor.machine import check_data, check_machine
from kit.tools.doctor.result import Report


@pytest.fixture
def checked(tmp_path, capsys):
    """The results for some flags: the status and the text by name."""

    def checked(*words):
        check_machine(Report(), plan_launch(read_command_line([f"--output_dir={tmp_path}", *words])), None)
        found = re.findall(r"^(ok|warn|fail) +(launch|memory and disk|\w+) +(.*)$", capsys.readouterr().out, re.M)
        return {name: (status, text) for status, name, text in found}

    return checked


def failed(results):
    return [name for name, (status, _) in results.items() if status == "fail"]


def test_a_model_that_is_not_there_is_one_failure(checked):
    results = checked("--model_name_or_path", "./nowhere", "--dataset", "nowhere.jsonl", "--max_length", "8")
    assert failed(results) == ["model", "data"] and "there is no model" in results["memory and disk"][1]
    assert results["model"][1].startswith("model_name_or_path: ./nowhere: no such folder; expected a folder with ")


def test_one_fault_of_a_machine_is_one_failed_check(checked, monkeypatch, tmp_path):
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
        assert failed(results) == [name] and found in results[name][1]


def test_a_config_for_several_machines_says_how_to_check_them_all(checked, tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: 10.7.0.1\n"
        "mixed_precision: 'no'\n"
    )
    status, text = checked("--config", str(config))["launch"]
    assert status == "warn" and "of 2 machines only this one is checked" in text
    config.write_text(config.read_text().replace("main_process_ip: 10.7.0.1\n", ""))
    assert "main_process_ip: missing" in checked("--config", str(config))["launch"][1]


def test_local_data_asks_no_hub(recipe, monkeypatch):
    monkeypatch.setattr(machine, "ask_hub", lambda name, flag, revision: pytest.fail("asked"))
    assert "train.jsonl" in (found := check_data(recipe.dataset_entries, [])) and "http" not in found
