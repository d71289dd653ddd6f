"""``kit recipes`` lists every recipe at once."""

from kit.cli.main import main
from kit.config.hints import recipe_names


def test_recipes_lists_every_recipe_in_aligned_columns(capsys):
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert sorted(line.split()[0] for line in table[1:]) == recipe_names()
    assert max(map(len, table)) <= 120
    starts = [
        table[0].index(title) for title in ("size", "config", "GPUs", "micro-batch", "checkpointing", "GiB", "tokens")
    ]
    assert all(line[start - 1] == " " and line[start] != " " for line in table[1:] for start in starts)
    line = next(line for line in table if line.startswith("llama-8b-qlora"))
    assert line.split()[:6] == ["llama-8b-qlora", "8.03B", "single", "1", "x", "12"]
