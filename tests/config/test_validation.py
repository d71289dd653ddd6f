"""Whatever is wrong with a setting is reported where it stands: what was found, what was expected, and what to do."""

import re

import pytest
from config_helpers import problems

from kit.config.command_line import read_command_line


@pytest.mark.parametrize(
    "line",
    """max_steps: true
    learning_rate: false
    max_steps: 3.5
    max_steps: 0
    max_steps: [3]
    max_length: null
    lora_dropout: 1
    learning_rate: inf
    learning_rate: 0
    warmup_steps: 1.5
    eval_split_size: 10.5
    method: LoRA
    use_dora: maybe
    dataset: {a: b}
    dataset: ""
    report_to: [wandb, 3]
    lora_target_modules: []
    dataset_columns: {a: [b]}
    dataset_columns: a
    dataset_columns: a=b,a=c
    seed: 99999999999999999999""".splitlines(),
)
def test_a_wrong_value_is_refused_with_its_line_what_was_found_and_what_was_expected(recipe_file, line):
    line = line.strip()
    key = line.partition(":")[0]
    argv = recipe_file("# a comment\n" + line, base=key != "dataset")
    if key == "dataset":
        argv += ["--model_name_or_path", "m"]
    found = problems(argv)
    where = f"mine.yaml:{2 if key == 'dataset' else 4} {key}"
    assert list(found) == [where]
    assert ("found " in found[where] or "no value" in found[where]) and "expected " in found[where]


def test_a_mistyped_key_is_not_reported_as_missing_too(recipe_file):
    argv = recipe_file("model_name_or_path: m\ndatset: d\n", base=False)
    assert list(problems(argv)) == ["mine.yaml:2 datset"]
    argv = recipe_file("base_model: m\ndataset: d\n", base=False)
    assert list(problems(argv)) == ["mine.yaml:1 base_model"]


def test_what_is_missing_is_named(recipe_file):
    assert set(problems(recipe_file("", base=False))) == {"model_name_or_path", "dataset"}


def test_a_contradiction_is_kept_back_while_one_of_its_settings_is_wrong(recipe_file):
    argv = recipe_file("method: qlroa\nuse_dora: true\neval_steps: 5\neval_split_size: many\n")
    assert set(problems(argv)) == {"mine.yaml:3 method", "mine.yaml:6 eval_split_size"}


def test_a_launch_flag_in_a_recipe_is_sent_to_the_command_line(recipe_file):
    text = problems(recipe_file("num_processes: 2"))["mine.yaml:3 num_processes"]
    assert "a flag, not a key of a recipe" in text and "type --num_processes 2" in text


def test_a_list_of_data_sets_is_checked_entry_by_entry():
    cases = [
        ("[{path: a, weight: -1}]", r"--dataset\[0\].weight: found '-1'; expected number from 0"),
        ("[a, {path: b, wieght: 1}]", r"--dataset\[1\].wieght: unknown key; .*\n.*did you mean 'weight'"),
        ("[{weight: 1}]", r"--dataset\[0\].path: missing"),
        ("[{path: a, columns: q}]", r"--dataset\[0\].columns: found 'q'; expected column=field"),
        ("a.jsonl,b/a.jsonl", r"two datasets are named 'a'\n.*name: first"),
        ("[{path: a, weight: 0}, {path: b, weight: 0}]", r"--dataset: all weights are 0"),
    ]
    for value, message in cases:
        request = read_command_line(["--model_name_or_path", "m", "--dataset", value])
        assert re.search(message, "\n".join(map(str, request.problems))), (value, message)
