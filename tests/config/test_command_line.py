"""What a user types and writes: who wins, what is refused, and all that is wrong reported at once, where it stands."""

import pytest
from config_helpers import accepted, problems

from kit.config.command_line import read_command_line, read_flags
from kit.config.recipe import Recipe
from kit.config.validation import FLAGS

# Who wins


def test_flags_beat_the_recipe_and_the_recipe_beats_the_defaults(recipe_file):
    argv = recipe_file("max_length: 100\nlora_r: 8\n")
    recipe = accepted([*argv, "--lora_r", "4"])
    assert (recipe.lora_r, recipe.max_length, recipe.seed) == (4, 100, Recipe.model_fields["seed"].default)


def test_the_default_recipe_serves_unless_a_model_is_named():
    assert read_command_line([]).recipe_name == "tiny"
    assert read_command_line(["--dataset", "d"]).recipe_name == "tiny"
    request = read_command_line(["--model_name_or_path", "org/Llama-3.1-8B", "--dataset", "d"])
    assert request.problems == [] and request.recipe_name == "Llama-3.1-8B"


def test_a_flag_may_be_written_in_several_ways():
    cases = [
        ["--max_steps", "7", "--use_dora"],
        ["--max-steps", "7", "--use-dora", "true"],
        ["--max_steps=7.0", "--use_dora=yes"],
        ["--use_dora", "--max-steps=7"],
    ]
    for argv in cases:
        recipe = accepted(argv)
        assert (recipe.max_steps, recipe.use_dora) == (7, True), argv


def test_any_model_can_be_asked_with_tools():
    words = ["--model_name_or_path", "m", "--dataset", "d", "--tools", "own.py:add"]
    request = read_command_line(words, trains=False)
    assert request.problems == [] and request.recipe.tools == ["own.py:add"] and request.recipe.rewards == []
    assert "objective sft does not read it" in str(read_command_line(words).problems[0])
    wrong = read_command_line([*words, "--rewards", "environment"], trains=False)
    assert "--environment FILE.py:CLASS" in str(wrong.problems[0])


def test_a_model_in_the_folder_of_a_run_is_named_by_the_run():
    for inside in ["final", "checkpoints/step-00000040", ""]:
        request = read_command_line(["--model_name_or_path", f"runs/mine/{inside}", "--dataset", "d.jsonl"])
        assert request.recipe_name == "mine", inside


def test_none_undoes_what_the_recipe_set(recipe_file):
    argv = recipe_file("max_steps: 5\nreport_to: [wandb]\ndataset_columns: {a: b}\n")
    recipe = accepted([*argv, "--max_steps", "none", "--report_to", "none", "--dataset_columns", "none"])
    assert (recipe.max_steps, recipe.report_to, recipe.dataset_columns) == (None, [], {})


def test_own_data_is_not_judged_by_the_evaluation_of_the_recipe_s():
    """`--dataset mine` with the default recipe: its evaluation set is about something else."""
    own = read_command_line(["--dataset", "mine.jsonl"])
    assert not own.problems and own.recipe.eval_dataset is None and not own.recipe.predict_with_generate
    split = read_command_line(["--dataset", "mine.jsonl", "--eval_split_size", "0.1"])
    assert not split.problems and split.recipe.predict_with_generate
    given = read_command_line(["--dataset", "mine.jsonl", "--eval_dataset", "theirs.jsonl"])
    assert given.recipe.eval_dataset == "theirs.jsonl" and given.recipe.eval_on_start
    assert read_command_line([]).recipe.eval_dataset.endswith("eval.jsonl")
    rollouts = read_command_line(["--recipe", "tiny-grpo", "--dataset", "mine.jsonl"])
    assert not rollouts.problems and not rollouts.recipe.predict_with_generate
    assert (rollouts.recipe.max_new_tokens, rollouts.recipe.per_device_eval_batch_size) == (48, 64)


def test_a_flag_replaces_the_other_source_of_evaluation_data_of_the_recipe():
    own = read_command_line(["--recipe", "llama-1b-lora", "--dataset", "mine.jsonl", "--eval_dataset", "theirs.jsonl"])
    assert not own.problems and own.recipe.eval_split_size == 0
    split = read_command_line(["--eval_split_size", "0.1"])
    assert not split.problems and split.recipe.eval_dataset is None
    both = read_command_line(["--eval_split_size", "0.1", "--eval_dataset", "theirs.jsonl"])
    assert [problem.where for problem in both.problems] == ["--eval_split_size"]


def test_a_flag_without_a_value_is_refused():
    for argv in [["--max_steps="], ["--max_steps", ""], ["--max_steps"], ["--config="]]:
        (text,) = problems(argv).values()
        assert "no value" in text, argv


POSITIONAL = ("model_name_or_path", "eval_dataset")


@pytest.mark.parametrize("words", [["m", "d.jsonl"], ["d.jsonl", "m"]])
def test_words_before_the_first_flag_are_the_model_and_the_data_where_a_script_takes_them(words):
    flags, wrong, _ = read_flags([*words, "--seed", "1"], POSITIONAL)
    assert wrong == [] and flags == {"model_name_or_path": "m", "eval_dataset": "d.jsonl", "seed": "1"}
    assert read_flags(words)[0] == {} and read_flags(words)[1]  # other scripts refuse them


def test_words_that_could_mean_something_else_are_refused():
    for argv in (["m", "d.jsonl", "e.jsonl"], ["-m", "x"], ["--seed", "1", "m"]):
        assert read_flags(argv, POSITIONAL)[1], argv


# Everything wrong, at once, in place


def test_all_problems_of_file_and_flags_come_together(recipe_file):
    argv = recipe_file(
        "max_steps: 3.5\nlora_r: true\nmethod: loar\nlearning-rate: 1\nfp16: true\nseed: 1\nseed: 2\n"
        "global_batch_size: 7\nper_device_train_batch_size: 2\n"
    )
    found = problems([*argv, "--num_processes", "0", "--max_length", "x", "--evl_steps", "3", "stray"])
    expected = {
        "mine.yaml:3 max_steps": "'3.5'",
        "mine.yaml:4 lora_r": "'true'",
        "mine.yaml:5 method": "did you mean 'lora'",
        "mine.yaml:6 learning-rate": "did you mean 'learning_rate'",
        "mine.yaml:7 fp16": "Accelerate config",
        "mine.yaml:9 seed": "line 8",
        "mine.yaml:10 global_batch_size": "smaller --per_device_train_batch_size",
        "--num_processes": "'0'",
        "--max_length": "'x'",
        "--evl_steps": "did you mean 'eval_steps'",
        "'stray'": "--flag value",
    }
    assert set(found) == set(expected)
    for where, part in expected.items():
        assert part in found[where]
    assert read_command_line(argv).recipe is None


def test_an_unreadable_recipe_is_one_problem_and_hides_no_wrong_flag():
    found = problems(["--recipe", "llama-8b-lroa", "--max_length", "x", "--eval_steps", "5"])
    assert set(found) == {"--recipe", "--max_length"}
    assert "did you mean 'llama-8b-lora'" in found["--recipe"]


def test_of_a_flag_given_twice_the_last_value_is_taken_and_a_note_says_so():
    request = read_command_line(["--seed", "1", "--learning_rate=1e-4", "--seed=2", "--learning_rate=1e-4"])
    assert request.problems == [] and request.recipe.seed == 2
    assert request.notes == ["note: --seed given twice: '1' and '2'; the last one is taken"]


# Help


def test_help_shows_every_flag_with_its_unit_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        read_command_line(["--seed", "1", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, info in FLAGS.items():
        entries = text.replace("\n        ", " ").splitlines()  # a long one goes on in the next line
        line = next(line for line in entries if line.startswith(f"  --{name} "))
        assert f"[{info.json_schema_extra['unit']}]" in line or not info.json_schema_extra["unit"]
        assert "(required)" in line or "(default: " in line
        assert info.description in text
    assert "--lora_r <whole number from 1>  (default: 16)" in text
    assert max(map(len, text.splitlines())) <= 120 and text.isascii()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--recipe", "llama-8b-lora"], "llama-8b-lora"),
        (["--recipe", "llama-8b-lora", "--objective", "dpo"], "llama-8b-lora-dpo"),
        (["--recipe", "llama-8b-lora", "--objective", "dft"], "llama-8b-lora"),
    ],
)
def test_a_run_of_preferences_has_another_folder_than_the_one_before_it(words, name):
    assert read_command_line(words).recipe_name == name
