"""``kit recipes`` lists every recipe at once."""

from kit.cli.main import main
from kit.config.hints import recipe_names


def test_recipes_lists_every_recipe_with_what_it_needs(capsys):
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert sorted(line.split()[0] for line in table[1:]) == recipe_names()
    line = next(line for line in table if line.startswith("llama-8b-qlora"))
    assert line.split()[:6] == ["llama-8b-qlora", "8.03B", "single", "1", "x", "12"]
