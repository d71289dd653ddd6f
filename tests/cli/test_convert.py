"""``kit convert`` writes a recipe that loads, says what became of each key, and never writes over a file."""

import re
import shlex

import pytest
import yaml

from kit.cli.main import main
from kit.config.command_line import read_command_line
from kit.config.recipe_file import read_recipe_file
from kit.config.validation import load_recipe
from kit.errors import UserError

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
    assert main(["convert", theirs(), "--out", "ours.yaml", "--num_processes", "2"]) == 0
    out = capsys.readouterr().out
    recipe = load_recipe("ours.yaml")
    assert (recipe.model_name_or_path, recipe.dataset, recipe.global_batch_size) == ("model", "chats.jsonl", 4)
    words = shlex.split(out.splitlines()[-1])
    request = read_command_line(words[words.index("--config") :])
    assert (request.launch.config, request.launch.num_processes, request.problems) == ("ddp", 2, [])
    assert request.recipe == recipe
    assert "changes only speed or memory:\n  flash_attention: True" in out and "wandb_project" not in out


def test_without_out_the_recipe_is_printed_as_a_file_that_loads(theirs, capsys, tmp_path):
    assert main(["convert", theirs()]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_recipe("printed.yaml").max_length == 256


def test_a_flag_of_a_recipe_wins_over_the_file(theirs):
    assert main(["convert", theirs(), "--out", "ours.yaml", "--max_length", "512", "--seed", "1"]) == 0
    assert (load_recipe("ours.yaml").max_length, load_recipe("ours.yaml").seed) == (512, 1)


def test_a_data_set_that_is_typed_replaces_that_of_the_file_with_all_that_describes_it(theirs):
    data = [{"path": "a/b", "split": "train[:5]", "type": "chat_template", "field_messages": "turns", "name": "main"}]
    path = theirs(datasets=data, test_datasets=data, evals_per_epoch=1)
    assert main(["convert", path, "--out", "ours.yaml", "--dataset", "mine.jsonl"]) == 0
    recipe = load_recipe("ours.yaml")
    assert (recipe.dataset, recipe.dataset_split, recipe.dataset_columns) == ("mine.jsonl", "train", {})
    assert not recipe.has_evaluation and recipe.dataset_config is None


def test_rows_that_the_file_holds_out_go_with_its_data_but_a_share_stays(theirs, capsys):
    assert (
        main(["convert", theirs(val_set_size=500, evals_per_epoch=1), "--out", "a.yaml", "--dataset", "m.jsonl"]) == 0
    )
    assert not load_recipe("a.yaml").has_evaluation
    assert "eval_split_size: 500" in capsys.readouterr().out
    assert (
        main(["convert", theirs(val_set_size=0.1, evals_per_epoch=1), "--out", "b.yaml", "--dataset", "m.jsonl"]) == 0
    )
    assert load_recipe("b.yaml").eval_split_size == 0.1
    flags = ["--dataset", "m.jsonl", "--eval_split_size", "9"]
    assert main(["convert", theirs(val_set_size=500, evals_per_epoch=1), "--out", "c.yaml", *flags]) == 0
    recipe = load_recipe("c.yaml")
    assert (recipe.eval_split_size, recipe.eval_strategy) == (9, "epoch")


def test_names_for_a_tracker_go_with_it(theirs, capsys):
    path = theirs(wandb_project="p", wandb_name="n")
    assert main(["convert", path, "--out", "ours.yaml", "--report_to", "none"]) == 0
    recipe = load_recipe("ours.yaml")
    assert (recipe.report_to, recipe.project, recipe.run_name) == ([], "kit", None)


def test_a_file_that_sharded_says_that_the_processes_are_missing(theirs, capsys):
    assert main(["convert", theirs(fsdp_config={"reshard_after_forward": True}), "--out", "ours.yaml"]) == 0
    out = capsys.readouterr().out
    assert "the weights were sharded: give --num_processes N" in out
    # On a machine with more, the global batch may not be divisible by all of them.
    assert out.splitlines()[-1].endswith("--config fsdp --recipe ours.yaml --num_processes 1")


def test_no_credential_of_the_file_reaches_the_recipe(theirs, tmp_path, capsys):
    path = theirs(wandb_api_key="0123456789abcdef0123456789abcdef01234567", hub_model_id="hf_" + "aB3" * 12)
    assert main(["convert", path, "--out", "ours.yaml"]) == 0
    for text in ((tmp_path / "ours.yaml").read_text(), capsys.readouterr().out):
        assert "0123456789abcdef" not in text and "aB3aB3" not in text and "***" in text


def test_an_existing_file_is_never_written_over(theirs, tmp_path, capsys):
    (tmp_path / "ours.yaml").write_text("mine")
    assert main(["convert", theirs(), "--out", "ours.yaml"]) == 2
    assert (tmp_path / "ours.yaml").read_text() == "mine"
    fix = capsys.readouterr().err.split("-> ")[1]
    assert main(["convert", theirs(), *shlex.split(fix)]) == 0


def test_what_changes_what_is_learned_is_listed_at_once_with_a_flag_that_works(theirs, tmp_path, capsys):
    path = theirs(min_sample_len=5, optimizer="lion_pytorch")
    assert main(["convert", path, "--out", "ours.yaml"]) == 2
    err = capsys.readouterr().err
    assert "2 problems" in err and re.search(r"theirs.yml:\d min_sample_len: 5 changes what is learned", err)
    assert not (tmp_path / "ours.yaml").exists()
    fix = err.split("-> ")[1].partition(" leaves")[0]
    assert main(["convert", path, "--out", "ours.yaml", *shlex.split(fix)]) == 0
    assert "min_sample_len: 5" in (tmp_path / "ours.yaml").read_text()


def test_a_drop_that_drops_nothing_is_a_mistake(theirs, capsys):
    assert main(["convert", theirs(min_sample_len=5), "--drop", "min_sample_len,min_sample_lem"]) == 2
    assert "did you mean 'min_sample_len'" in capsys.readouterr().err


def test_a_chat_template_in_the_file_is_written_beside_the_recipe(theirs, tmp_path):
    path = theirs(chat_template_jinja="{% for m in messages %}{{ m.content }}{% endfor %}", chat_template="jinja")
    assert main(["convert", path]) == 2
    assert main(["convert", path, "--out", "ours.yaml"]) == 0
    assert load_recipe("ours.yaml").chat_template == "ours.jinja"
    assert (tmp_path / "ours.jinja").read_text().startswith("{% for m")


def test_alpaca_rows_get_a_template_without_tags_unless_another_one_or_other_data_are_typed(theirs, tmp_path):
    path = theirs(datasets=[{"path": "rows.jsonl", "type": "alpaca"}])
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "input": "b", "output": "c"}\n')
    assert main(["convert", path, "--out", "ours.yaml"]) == 0
    recipe = load_recipe("ours.yaml")
    assert recipe.chat_template == "ours.jinja" and (tmp_path / "ours.jinja").is_file()
    assert recipe.dataset_entries[0].prompt_format.endswith("### Response:\n")
    for i, (typed, template) in enumerate(((["--chat_template", "chatml"], "chatml"), (["--dataset", "other"], None))):
        assert main(["convert", path, "--out", f"{i}.yaml", *typed]) == 0
        assert load_recipe(f"{i}.yaml").chat_template == template and not (tmp_path / f"{i}.jinja").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["theirs.yml", "--sequence_len", "5"], "--sequence_len: unknown flag"),
        (["theirs.yml", "--num_processes", "0"], "expected whole number from 1"),
        (["theirs.yml", "--max_length", "3"], "max_length"),
        (["theirs.yml", "--out", "."], "--out my.yaml"),
        (["script.sh"], "model_name_or_path: found m$i, which another program fills in"),
        (["."], "kit export"),
    ],
)
def test_what_is_wrong_is_said_with_status_2(theirs, words, says, tmp_path, capsys):
    theirs()
    (tmp_path / "script.sh").write_text("for i in 1 2; do swift sft --model m$i --dataset x; done\n")
    assert main(["convert", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_a_file_of_another_kit_as_recipe_is_named_in_one_line_with_the_command_that_converts_it(theirs, capsys):
    with pytest.raises(UserError) as refused:
        read_recipe_file(theirs())
    (problem,) = refused.value.problems
    assert problem.found == "theirs.yml is a file of axolotl"
    assert main(shlex.split(problem.fix)[1:]) == 0
    assert load_recipe("my.yaml").max_length == 256


def test_a_recipe_with_a_few_words_of_another_kit_is_still_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\nwarmup_ratio: 0.1\ntorch_dtype: auto\nuse_peft: true\nlr: 1\n")
    assert read_recipe_file(str(path)).values["dataset"] == "d"
