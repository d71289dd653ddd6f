"""The ``kit`` command answers quickly, in aligned text, and refuses what it does not know."""

import subprocess
import sys

import pytest

from kit.cli.main import main
from kit.config.recipe import RECIPES, ROOT


def test_recipes_lists_every_recipe_in_aligned_columns_of_at_most_100(capsys):
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert {line.split()[0] for line in table[1:]} == {path.stem for path in RECIPES.glob("*.yaml")}
    assert max(map(len, table)) <= 100
    starts = [table[0].index(title) for title in ("model", "parameters", "method", "config", "GPUs")]
    assert all(line[start - 1] == " " and line[start] != " " for line in table[1:] for start in starts)
    line = next(line for line in table if line.startswith("llama-8b-full"))
    assert line.split() == ["llama-8b-full", "llama-8b", "8.03B", "full", "fsdp", "4", "x", "80", "GB"]


def test_a_recipe_without_a_header_is_told_and_the_others_are_listed(capsys, tmp_path, monkeypatch):
    good = (RECIPES / "llama-8b-lora.yaml").read_text(encoding="utf-8")
    (tmp_path / "good.yaml").write_text(good, encoding="utf-8")
    (tmp_path / "bare.yaml").write_text(good.partition("\n\n")[2], encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(good + "learning_rat: 1\n", encoding="utf-8")
    monkeypatch.setattr("kit.cli.main.RECIPES", tmp_path)
    assert main(["recipes"]) == 2
    out, err = capsys.readouterr()
    assert "good" in out and "bare" not in out
    assert "bare.yaml:1" in err and "did you mean 'learning_rate'" in err


def test_help_names_the_commands(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert main(argv) == 0
        assert "recipes" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_a_hint(capsys):
    assert main(["recpies"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "did you mean 'recipes'" in err


def test_recipes_answers_within_a_second_and_without_torch():
    code = """
import sys, time
from kit.cli.main import main
status = main(["recipes"])
assert not {"torch", "transformers", "accelerate"} & set(sys.modules)
print(time.process_time(), file=sys.stderr)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 0 and float(done.stderr) < 1, done.stderr


@pytest.mark.parametrize("command", ["inspect", "prepare"])
def test_what_a_run_would_refuse_is_refused_before_any_data_is_read(command, model_folder, chat_file, capsys):
    wrong = ["--max_length", "9999", "--lora_target_modules", "q_porj", "--eval_dataset", "nowhere.jsonl"]
    assert main([command, "--model_name_or_path", str(model_folder), "--dataset", str(chat_file), *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: 3 problems")
    for message in ("max_length: 9999 tokens, the model has 1024 positions", "'q_porj'", "nowhere.jsonl"):
        assert message in err


def test_prepare_says_what_the_run_will_say_and_whether_it_had_to_work(
    model_folder, chat_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    flags = ["--model_name_or_path", str(model_folder), "--dataset", str(chat_file), "--max_length", "256"]

    def printed(*more):
        assert main(["prepare", *flags, *more]) == 0
        return capsys.readouterr().out

    cache = f"cache: {tmp_path / 'cache'}"
    out = printed()
    assert "padding: " in out and f"{cache}, 1 data set tokenised\n" in out
    assert f"{cache}, nothing to do: all is there\n" in printed()
    out = printed("--packing", "--eval_dataset", str(chat_file), "--max_eval_samples", "3")
    assert "packing: " in out and f"{cache}, nothing to do: all is there\n" in out
    assert f"{cache}, 1 data set tokenised\n" in printed("--train_on", "last")


@pytest.mark.slow
def test_a_dry_run_says_of_the_data_what_the_run_says(finetune, fp32):
    def notes(run):
        return [line for line in run.output.splitlines() if line.startswith(("padding:", "packing:", "streaming:"))]

    run = finetune.ok("run", 2, config=fp32["ddp"], max_steps=1)
    dry = finetune("dry", config=fp32["ddp"], num_processes=2, dry_run=True)
    assert dry.status == 0 and not dry.folder.exists(), dry.output
    assert len(notes(dry)) == 1 and notes(dry) == notes(run)
    assert dry.output.splitlines()[-1].endswith("Dry run: nothing written but the tokenised data in the cache.")
    for flag in ("packing", "streaming"):
        dry = finetune(flag, config=fp32["single"], dry_run=True, **{flag: True})
        assert len(notes(dry)) == 1 and notes(dry)[0].startswith(flag), dry.output
