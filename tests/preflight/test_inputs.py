"""What is wrong with a model's folder, the data's columns or the output folder is reported before torch is imported."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT
from preflight_helpers import ONE_PROCESS

from kit.preflight import preflight
from kit.preflight.inputs import check_inputs
from kit.system.errors import UserError


def reported(check):
    with pytest.raises(UserError) as caught:
        check()
    return caught.value.problems


def test_what_is_right_is_no_problem(recipe):
    check_inputs(recipe())
    check_inputs(recipe(output_dir=None))


@pytest.fixture
def wrong(recipe, model_folder, chat_file, tmp_path):
    """Recipes with one mistake each."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.txt").write_text("mine")
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare)
    (bare / "model.safetensors").unlink()
    shutil.copy(chat_file, tmp_path / "other.jsonl")
    return {
        "model": recipe(model_name_or_path=str(tmp_path / "none")),
        "weights": recipe(model_name_or_path=str(bare)),
        "adapter": recipe(adapter_name_or_path=str(tmp_path / "none"), method="lora"),
        "data": recipe(dataset=str(tmp_path / "chat.jsonl")),
        "column": recipe(dataset_columns="question=instruction"),
        "output": recipe(output_dir=str(tmp_path / "taken")),
    }


MISTAKES = ["model", "weights", "adapter", "data", "column", "output"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_as_the_later_checks_report_it(wrong, mistake):
    problems = reported(lambda: check_inputs(wrong[mistake]))
    assert problems == reported(lambda: preflight.check(wrong[mistake], ONE_PROCESS, "mine"))


def test_a_dry_run_needs_no_weights(wrong):
    check_inputs(wrong["weights"], needs_weights=False)


def test_no_hub_is_asked(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr("kit.data.samples.dataset.open_source", lambda *args, **options: pytest.fail("opened"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **options: pytest.fail("asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    names = {"model_name_or_path": "someone/model", "adapter_name_or_path": "someone/adapter"}
    check_inputs(recipe(dataset="someone/chats", **names))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single", "ddp"])
def test_the_script_reports_them_without_torch_and_before_it_starts_ranks(config, tmp_path):
    script = [str(ROOT / "recipes/finetune.py"), "--config", config, "--dataset", str(tmp_path / "none.jsonl")]
    command = [sys.executable, "-X", "importtime", *script, "--output_dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=own_environment())
    imported = [line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time")]
    assert result.returncode == 2 and result.stderr.count("error: dataset: no file or folder") == 1
    assert "kit.preflight.inputs" in imported and not {"torch", "transformers"} & set(imported)


def own_environment():
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
