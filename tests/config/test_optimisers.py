"""The setting lists the optimisers of the table; those of other kits are refused by name, with what to use."""

import re

from transformers.training_args import OptimizerNames

from kit.config.command_line import read_command_line
from kit.config.conflicts import find_conflicts
from kit.config.fields import choices
from kit.config.optimisers import OPTIMISERS, OTHER_NAMES, optimiser_of_other_kits
from kit.config.recipe import Recipe
from kit.config.validation import check_recipe


def test_the_setting_lists_the_table():
    assert choices(Recipe.model_fields["optim"].annotation) == list(OPTIMISERS)


THEIRS = "muonclip lion_pytorch galore_adamw_8bit q_galore adam_mini came_pytorch optimi_adamw ao_adamw_4bit".split()


def test_each_optimiser_of_transformers_is_offered_or_named_with_what_to_use():
    for name in sorted({each.value for each in OptimizerNames} | {*THEIRS, *OTHER_NAMES}):
        answer = optimiser_of_other_kits(name)
        assert (name in OPTIMISERS) != bool(answer), name
        if answer:
            assert set(re.findall(r"\w*(?:adamw|lion)_\w+", answer)) <= set(OPTIMISERS) and "use " in answer, name


def test_the_message_has_the_reason_in_place_of_a_guess_by_spelling():
    values = {"model_name_or_path": "m", "dataset": "x.jsonl", "optim": "galore_adamw"}
    (problem,) = check_recipe(values, {key: key for key in values})[1]
    assert "projects whole gradients" in problem.fix and "use adamw_8bit" in problem.fix


def test_lion_has_no_default_rate():
    recipe = Recipe(model_name_or_path="m", dataset="x.jsonl", optim="lion_8bit")
    (conflict,) = find_conflicts(recipe)
    rate = float(re.search(r"--learning_rate (\S+),", conflict.fix)[1])
    assert not find_conflicts(recipe.model_copy(update={"learning_rate": rate}))


def test_lion_does_not_take_a_recipes_rate_for_adamw(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model_name_or_path: m\ndataset: x.jsonl\nlearning_rate: 1e-4\n")
    words = ["--recipe", str(file), "--optim", "lion_32bit"]
    (problem,) = read_command_line(words).problems
    assert "mine.yaml:3" in problem.where and "--learning_rate 2e-05" in problem.fix
    assert not read_command_line([*words, "--learning_rate", "1e-4"]).problems
    file.write_text(file.read_text() + "optim: lion_8bit\n")
    assert not read_command_line(words).problems  # the file's rate is for lion
