"""The record of a run is read back unchanged, with the model for its weights; other files are refused."""

import json

import pytest
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.run.folder import RunFolder
from kit.run.identity import identity
from kit.run.record import (
    as_trained,
    read_metrics,
    read_run,
    with_model_of_run,
    write_record,
)
from kit.system.errors import UserError


@pytest.fixture
def run_file(recipe, model_folder, tmp_path):
    """``run.json`` of a run that trained an adapter of its own shape with a template of its own."""
    settings = {"model_name_or_path": str(model_folder), "lora_r": 3, "use_rslora": True, "chat_template": "llama3"}
    settings["chat_template_kwargs"] = {"mode": "off"}
    folder = RunFolder(recipe(**settings), "mine", identity(recipe(**settings), "abc", "base"))
    folder.open()
    folder.begin(actual_strategy(), {"fingerprint": "abc"}, 0, 8)
    return tmp_path / "out/run.json"


def test_the_record_of_a_run_is_read_back_as_it_was(run_file):
    recipe, strategy = read_run(run_file)
    assert (recipe.lora_r, recipe.chat_template, recipe.output_dir) == (3, "llama3", str(run_file.parent))
    assert strategy == actual_strategy()
    write_record(run_file.parent, json.loads(run_file.read_text()) | {"strategy": {"type": "ddp"}})
    with pytest.raises(UserError, match="no record of a run"):
        read_run(run_file)


def test_a_file_that_is_no_record_of_a_run_is_refused_by_name(tmp_path):
    for text in ("", "[]", '{"recipe": {}, "strategy": {}}', "[" * 200_000):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run\.json: no record of a run "):
            read_run(tmp_path / "run.json")


def test_lines_of_metrics_that_a_kill_cut_off_are_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = ['{"step": 1, "loss": 2.0}', "", "5", "[]", '{"step": "x"}', "[" * 200_000, '{"step": 2}', '{"step": 3, "l']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2}]


def test_the_model_of_a_run_is_opened_as_the_run_trained_it(run_file, model_folder):
    asked = Recipe(model_name_or_path="x", dataset="mine.jsonl", lora_r=64, seed=7)
    run, _ = read_run(run_file)
    opener = as_trained(with_model_of_run(asked, run_file), run)
    assert (opener.model_name_or_path, opener.lora_r, opener.use_rslora) == (str(model_folder), 3, True)
    assert (opener.dataset, opener.seed, opener.chat_template) == ("mine.jsonl", 7, "llama3")
    assert opener.chat_template_kwargs == {"mode": "off"}
    other = as_trained(asked.model_copy(update={"chat_template": "chatml"}), run)
    assert (other.chat_template, other.chat_template_kwargs) == ("chatml", None)
