"""``kit convert`` writes a recipe that loads, says what became of each key, and never writes over a file."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from kit.cli.main import main
from kit.config.command_line import read_command_line, read_recipe
from kit.config.recipe_file import read_recipe_file
from kit.system.errors import UserError

THEIRS = {
    "base_model": "model",
    "datasets": [{"path": "chats.jsonl", "type": "chat_template"}],
    "sequence_len": 256,
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
    "flash_attention": True,
    "wandb_project": None,
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Writes a file of axolotl with these keys beside ``THEIRS``."""
    monkeypatch.chdir(tmp_path)

    def theirs(**more):
        (tmp_path / "theirs.yml").write_text(yaml.safe_dump(THEIRS | more))
        return "theirs.yml"

    return theirs


def test_the_recipe_is_written_and_the_command_that_trains_it_is_printed(theirs, capsys):
    assert main(["convert", theirs(), "--out", "ours.yaml", "--num_processes", "2", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    recipe = read_recipe(["--recipe", "ours.yaml"])
    assert (recipe.model_name_or_path, recipe.dataset, recipe.global_batch_size) == ("model", "chats.jsonl", 4)
    assert recipe.seed == 1
    words = shlex.split(out.splitlines()[1])
    request = read_command_line(words[words.index("--config") :])
    assert (request.launch.config, request.launch.num_processes, request.problems) == ("ddp", 2, [])
    assert request.recipe == recipe
    assert out == Path("ours.yaml").read_text()
    assert main(["convert", theirs(context_parallel_size=2), "--num_processes", "4"]) == 0
    assert "--num_processes 4 --sequence_parallel_size 2\n" in capsys.readouterr().out
    assert "changes only speed or memory.\n#   flash_attention: True" in out and "wandb_project" not in out


def test_no_credential_of_the_file_reaches_the_recipe(theirs, tmp_path, capsys):
    path = theirs(wandb_api_key="0123456789abcdef0123456789abcdef01234567", hub_model_id="hf_" + "aB3" * 12)
    assert main(["convert", path, "--out", "ours.yaml"]) == 0
    for text in ((tmp_path / "ours.yaml").read_text(), capsys.readouterr().out):
        assert "0123456789abcdef" not in text and "aB3aB3" not in text and "***" in text


def test_an_existing_file_is_never_written_over(theirs, tmp_path, capsys):
    (tmp_path / "ours.yaml").write_text("mine")
    assert main(["convert", theirs(), "--out", "ours.yaml"]) == 2
    assert "ours.yaml exists" in capsys.readouterr().err and (tmp_path / "ours.yaml").read_text() == "mine"


def test_what_changes_what_is_learned_is_listed_at_once_with_a_flag_that_works(theirs, tmp_path, capsys):
    path = theirs(min_sample_len=5, optimizer="lion_pytorch")
    assert main(["convert", path, "--out", "ours.yaml"]) == 2
    err = capsys.readouterr().err
    assert "2 problems" in err and re.search(r"theirs.yml:\d min_sample_len: 5 changes training", err)
    assert not (tmp_path / "ours.yaml").exists()
    fix = err.split("-> ")[1].partition(" leaves")[0]
    assert main(["convert", path, "--out", "ours.yaml", *shlex.split(fix), "--optim", "adamw_torch_fused"]) == 0
    assert "min_sample_len: 5" in (tmp_path / "ours.yaml").read_text()


def test_a_file_of_another_kit_as_recipe_is_named_in_one_line_with_the_command_that_converts_it(theirs):
    with pytest.raises(UserError) as refused:
        read_recipe_file(theirs())
    (problem,) = refused.value.problems
    assert problem.found == "theirs.yml is a file of axolotl"
    assert main(shlex.split(problem.fix)[1:]) == 0
    assert read_recipe(["--recipe", "my.yaml"]).max_length == 256
