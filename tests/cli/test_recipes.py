"""``kit recipes`` lists every recipe at once, and reports what is wrong with one."""

from kit.cli.main import main
from kit.config.hints import recipe_names
from kit.config.recipe import RECIPES


def test_recipes_lists_every_recipe_in_aligned_columns(capsys):
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert sorted(line.split()[0] for line in table[1:]) == recipe_names()
    assert max(map(len, table)) <= 120
    starts = [table[0].index(title) for title in ("model", "parameters", "config", "GPUs", "GiB", "tokens")]
    assert all(line[start - 1] == " " and line[start] != " " for line in table[1:] for start in starts)
    line = next(line for line in table if line.startswith("llama-8b-qlora"))
    assert line.split()[:7] == ["llama-8b-qlora", "llama-8b", "8.03B", "single", "1", "x", "12"]


def test_a_recipe_without_a_header_is_reported_and_the_others_are_listed(capsys, tmp_path, monkeypatch):
    good = (RECIPES / "llama-8b.yaml").read_text(encoding="utf-8")
    (tmp_path / "good.yaml").write_text(good, encoding="utf-8")
    (tmp_path / "bare.yaml").write_text(good.partition("\n\n")[2], encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(good + "learning_rat: 1\n", encoding="utf-8")
    monkeypatch.setattr("kit.cli.recipes.RECIPES", tmp_path)
    assert main(["recipes"]) == 2
    out, err = capsys.readouterr()
    assert "good" in out and "bare" not in out
    assert "bare.yaml:1" in err and "did you mean 'learning_rate'" in err
