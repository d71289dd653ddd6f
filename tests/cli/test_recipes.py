"""``kit recipes`` lists every recipe at once, and tells what is wrong with one."""

import re
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


def test_every_gated_size_has_a_model_that_needs_no_licence(capsys):
    main(["recipes"])
    text = capsys.readouterr().out
    for path in RECIPES.glob("llama-*.yaml"):
        size = path.stem.rpartition("-")[0]
        assert re.search(rf"^  {size} +--model_name_or_path (?!meta-llama)\S+/\S+ \(.*\)$", text, re.MULTILINE), size


def test_a_recipe_without_a_header_is_told_and_the_others_are_listed(capsys, tmp_path, monkeypatch):
    good = (RECIPES / "llama-8b-lora.yaml").read_text(encoding="utf-8")
    (tmp_path / "good.yaml").write_text(good, encoding="utf-8")
    (tmp_path / "bare.yaml").write_text(good.partition("\n\n")[2], encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(good + "learning_rat: 1\n", encoding="utf-8")
    monkeypatch.setattr("kit.cli.recipes.RECIPES", tmp_path)
    assert main(["recipes"]) == 2
    out, err = capsys.readouterr()
    assert "good" in out and "bare" not in out
    assert "bare.yaml:1" in err and "did you mean 'learning_rate'" in err


@pytest.mark.slow
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
