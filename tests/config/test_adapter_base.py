"""An adapter is never put on another model than its own because a setting was left out."""

import json

import pytest
from config_helpers import problems

from kit.config.command_line import read_command_line


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A folder with the config of an adapter of the model ``base``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    folder = tmp_path / "runs/mine/final"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    return folder


@pytest.mark.parametrize("flag", ["model_name_or_path", "adapter_name_or_path"])
def test_either_flag_names_an_adapter_and_the_base_is_its_own(flag, adapter, tmp_path):
    request = read_command_line([f"--{flag}", "runs/mine/final", "--dataset", "my.jsonl"])
    assert not request.problems
    assert request.recipe.model_name_or_path == str(tmp_path / "base")
    assert request.recipe.adapter_name_or_path == "runs/mine/final"
    assert request.recipe_name == "mine" and request.recipe.max_length == 2048  # nothing of the recipe tiny


def test_the_kind_of_an_adapter_is_its_own(adapter):
    def read(*words):
        return read_command_line(["--adapter_name_or_path", "runs/mine/final", "--dataset", "my.jsonl", *words]).recipe

    config = json.loads((adapter / "adapter_config.json").read_text())
    assert read().adapter_type == "lora"
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "OFT"}))
    assert read().adapter_type == "oft"
    assert read("--adapter_type", "lora").adapter_type == "lora"  # what was given is kept, and refused later
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": ["?"]}))
    assert read().adapter_type == "lora"


def test_a_base_that_is_given_is_kept(adapter):
    recipe = read_command_line(
        ["--model_name_or_path", "org/other", "--adapter_name_or_path", "runs/mine/final", "--dataset", "my.jsonl"]
    ).recipe
    assert recipe.model_name_or_path == "org/other"


def test_an_adapter_whose_base_is_gone_says_which_two_flags_to_type(adapter, tmp_path):
    (tmp_path / "base").rmdir()
    found = problems(["--model_name_or_path", "runs/mine/final", "--dataset", "my.jsonl"])
    (text,) = found.values()
    assert "which is not on this machine" in text
    assert "-> --model_name_or_path BASE --adapter_name_or_path runs/mine/final" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_a_config_that_names_no_base_is_one_problem(content, adapter):
    (adapter / "adapter_config.json").write_text(content)
    (text,) = problems(["--adapter_name_or_path", "runs/mine/final", "--dataset", "my.jsonl"]).values()
    assert "no adapter_config.json names its base" in text


def test_a_name_that_is_no_hub_id_names_no_base(adapter):
    (text,) = problems(["--adapter_name_or_path", "my adapter", "--dataset", "my.jsonl"]).values()
    assert "no adapter_config.json names its base" in text


def test_the_folder_of_a_run_is_no_adapter(adapter):
    found = problems(["--adapter_name_or_path", "runs/mine", "--dataset", "my.jsonl"])
    assert "expected the folder of an adapter, such as final/ of a run" in found["--adapter_name_or_path"]
