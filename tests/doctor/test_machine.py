"""All checks of a machine run, in order; a model that cannot be opened takes none of the others with it."""

import pytest

from kit.config.command_line import read_command_line
from kit.doctor.machine import check_machine
from kit.doctor.result import Report
from kit.strategy.launch import look


@pytest.fixture
def checked(tmp_path):
    """The results for some flags, by name."""

    def checked(*words):
        report = Report(lambda result: None)
        check_machine(report, look(read_command_line([f"--output_dir={tmp_path}", *words])), None)
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


def test_too_few_gpus_fail_as_the_run_would(checked, monkeypatch):
    from kit.doctor import devices
    from kit.doctor.result import ok

    monkeypatch.setattr("kit.strategy.launch._devices", lambda: (2, "cuda"))
    for name in ("check_driver", "check_bf16", "check_four_bit", "check_gpus", "check_attention"):
        monkeypatch.setattr(devices, name, lambda *args, name=name: ok(name, ""))
    results = checked("--config", "ddp", "--num_processes", "4")
    result = results["launch"]
    assert result.status == "fail" and "4 on a machine with 2 GPUs; expected at most 2" in result.found
    assert results["batch"].cure == "--per_device_train_batch_size 8: the same maths"


def test_a_config_for_several_machines_says_how_to_check_them_all(checked, tmp_path, monkeypatch):
    config = tmp_path / "two.yaml"
    config.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: 127.0.0.1\n"
        "mixed_precision: 'no'\n"
    )
    monkeypatch.setattr("sys.argv", ["/bin/kit", "doctor", "--config", str(config)])
    results = checked("--config", str(config))
    assert results["launch"].status == "warn"
    assert f"accelerate launch --config_file {config} -m kit.cli.main doctor" in results["launch"].cure
    assert results["host name"].status == "fail" and "127.0.0.1" in results["host name"].found
