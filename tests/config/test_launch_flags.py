"""What only the command line has is a flag, and no key of a recipe."""

from kit.config.command_line import read_command_line
from kit.config.launch_flags import Launch
from kit.config.recipe import Recipe


def test_a_flag_of_the_start_is_no_setting_of_the_run():
    assert {"config", "recipe", "num_processes"} <= set(Launch.model_fields)
    assert not set(Launch.model_fields) & set(Recipe.model_fields)
    request = read_command_line(["--config", "ddp", "--num_processes", "2", "--dry_run"])
    assert (request.launch.config, request.launch.num_processes, request.launch.dry_run) == ("ddp", 2, True)


def test_a_recipe_that_has_one_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("model_name_or_path: m\ndataset: d\nnum_processes: 2\n")
    (problem,) = read_command_line(["--recipe", str(tmp_path / "mine.yaml")]).problems
    assert "mine.yaml:3 num_processes: not a key of a recipe" in str(problem)
    assert "type it: --num_processes 2" in str(problem)
