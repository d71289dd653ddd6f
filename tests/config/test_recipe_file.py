"""Whatever a YAML file holds, its values mean what their author meant, and a mistake has its line."""

import os

import pytest
from config_helpers import accepted, problems

from kit.config.command_line import read_command_line
from kit.config.paths import RECIPES, ROOT
from kit.config.recipe_file import find_file, read_yaml
from kit.system.errors import UserError


def test_paths_of_a_recipe_are_looked_up_beside_it_first(recipe_file, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "data.jsonl").touch()
    recipe_file("")
    os.rename("mine.yaml", folder / "mine.yaml")
    argv = ["--recipe", "elsewhere/mine.yaml"]
    with open(folder / "mine.yaml", "a", encoding="utf-8") as file:
        file.write("eval_dataset: data.jsonl\n")
    recipe = accepted(argv)
    assert os.path.samefile(recipe.eval_dataset, folder / "data.jsonl")
    assert recipe.dataset == "some/data"  # not there: a hub id, or relative to where the command runs
    assert accepted([*argv, "--eval_dataset", "data.jsonl"]).eval_dataset == "data.jsonl"


def test_yaml_values_mean_what_their_author_meant(recipe_file):
    cases = [
        ("learning_rate: 1e-4", 1e-4),
        ("max_steps: 3.0", 3),
        ("max_steps:", None),
        ("model_revision: 0123", "0123"),
        ("output_dir: 2024-01-01", "2024-01-01"),
        ("report_to: wandb", ["wandb"]),
        ("lora_target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("dataset_columns: {question: prompt}", {"question": "prompt"}),
        ("chat_template_kwargs: a=false", {"a": False}),
        ("chat_template_kwargs: {a: False, b: {c: false, d: [1, x]}}", {"a": False, "b": {"c": False, "d": [1, "x"]}}),
        ("eval_split_size: 200", 200),
    ]
    for line, value in cases:
        assert getattr(accepted(recipe_file(line)), line.partition(":")[0]) == value, (line, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01\x00\xff\xfe",
        b"- a\n- b\n",
        b"a: [1, 2",
        b"a: 1\n---\nb: 2\n",
        b"seed: *nowhere",
        b"seed: &s [*s]",
        b"{{a: b}: c}: 1",
        b"!!python/object/apply:os.system [ls]",
        b"a: " + b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_bytes(content)
    argv = ["--recipe", "mine.yaml", "--model_name_or_path", "m", "--dataset", "d"]
    found = problems(argv)
    assert found and all(where.startswith("mine.yaml") for where in found)


@pytest.mark.parametrize(
    "content", [b"a: 2024-13-45", b"a: !!int x", b"a: !!bool x", b"a: 1\na: 2", b"b: {a: 1, a: 2}"]
)
def test_read_yaml_turns_what_yaml_cannot_make_sense_of_into_a_user_error(content, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_yaml(path)


@pytest.mark.parametrize("name", [".", "x" * 5000, "no\udcffpe", "tiny/"])
def test_a_path_that_is_no_recipe_is_refused(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert list(problems(["--recipe", name])) == ["--recipe"]


def test_an_accelerate_config_is_no_recipe_and_its_name_is_one_word(tmp_path):
    (tmp_path / "a; touch it.yaml").write_text("compute_environment: LOCAL_MACHINE\n")
    text = problems(["--recipe", str(tmp_path / "a; touch it.yaml")])["--recipe"]
    assert "an Accelerate config" in text and f"--config '{tmp_path}/a; touch it.yaml' instead of --recipe" in text


def test_files_are_found_by_path_name_and_stem(recipe_file, tmp_path):
    recipe_file("")
    assert find_file("tiny", RECIPES, "recipe") == find_file("tiny.yaml", RECIPES, "recipe")
    assert find_file("mine.yaml", RECIPES, "recipe").resolve() == tmp_path / "mine.yaml"


BY_METHOD = """
learning_rate: 1e-5
by_method:
  lora: {learning_rate: 2e-4, chat_template_kwargs: {a: false}}
  qlora:
    learning_rate: 1e-4
    max_length: 512
"""


def test_settings_of_the_method_in_use_override_the_others_of_the_file(recipe_file):
    argv = recipe_file(BY_METHOD)
    rates = {method: accepted([*argv, "--method", method]).learning_rate for method in ("full", "lora", "qlora")}
    assert rates == {"full": 1e-5, "lora": 2e-4, "qlora": 1e-4}
    assert accepted(["--recipe", "mine-qlora"]).max_length == 512
    assert accepted(["--recipe", "mine-lora.yaml"]).chat_template_kwargs == {"a": False}
    assert accepted(["--recipe", "mine-lora", "--learning_rate", "3e-4"]).learning_rate == 3e-4  # flags win
    request = read_command_line(["--recipe", "mine-lora", "--method", "qlora"])
    assert (request.recipe_name, request.recipe.learning_rate) == ("mine-qlora", 1e-4)
    assert request.notes == ["note: --method qlora overrides that of --recipe mine-lora"]
    assert read_command_line(["--recipe", "mine-lora", "--method", "lora"]).notes == []
    assert read_command_line(argv).recipe_name == "mine-" + read_command_line(argv).recipe.method


def test_a_method_in_the_name_of_a_file_that_does_not_depend_on_it_is_no_recipe(recipe_file):
    recipe_file("seed: 1")
    assert list(problems(["--recipe", "mine-lora"])) == ["--recipe"]


BY_OBJECTIVE = """
learning_rate: 1e-5
seed: 1
by_objective:
  dpo: {learning_rate: 1e-6, beta: 0.3, seed: 2}
  kto: {seed: 3}
by_method:
  lora:
    learning_rate: 2e-4
    seed: 4
    by_objective:
      dpo:
        learning_rate: 5e-6
"""


def test_settings_of_the_objective_in_use_override_those_of_the_method_and_those_of_both_override_all(recipe_file):
    argv = recipe_file(BY_OBJECTIVE)

    def rate_seed_beta(*flags):
        recipe = accepted([*argv, *flags])
        return recipe.peak_learning_rate, recipe.seed, recipe.beta

    assert rate_seed_beta() == (2e-4, 4, None)
    assert rate_seed_beta("--objective", "dpo") == (5e-6, 2, 0.3)
    assert rate_seed_beta("--objective", "dpo", "--method", "full") == (1e-6, 2, 0.3)
    assert rate_seed_beta("--objective", "dpo", "--learning_rate", "3e-6", "--beta", "1") == (3e-6, 2, 1)  # flags win
    assert accepted(["--recipe", "mine-lora", "--objective", "dpo"]).learning_rate == 5e-6


@pytest.mark.parametrize("place", ["objective: dpo\n", "by_method:\n  lora: {objective: dpo}\n"])
def test_the_objective_in_use_may_stand_in_the_file_and_a_flag_wins(recipe_file, place):
    argv = recipe_file(f"{place}by_objective:\n  dpo: {{beta: 0.3}}\n  simpo: {{beta: 3}}\n")
    assert (accepted(argv).objective, accepted(argv).beta) == ("dpo", 0.3)
    assert accepted([*argv, "--objective", "simpo"]).beta == 3
    assert accepted([*argv, "--objective", "sft"]).beta is None


def test_a_rate_is_for_the_objective_that_the_file_names(recipe_file):
    cases = [
        ("objective: dpo\nlearning_rate: 1e-6", [], 1e-6, ""),
        ("objective: dpo\nlearning_rate: 1e-6", ["--objective", "simpo"], 1e-6, ""),  # which has the same defaults
        (
            "objective: dpo\nlearning_rate: 1e-6",
            ["--objective", "sft"],
            2e-4,
            "mine.yaml:4 learning_rate: 1e-6 is for dpo",
        ),
        ("by_objective: {dpo: {learning_rate: 1e-2}}", ["--objective", "dpo"], 1e-2, ""),  # somebody meant it
        ("objective: null\nlearning_rate: 1e-4", ["--objective", "dpo"], 5e-6, "is for sft"),
    ]
    for case in cases:
        text, flags, rate, note = case
        request = read_command_line([*recipe_file(text), *flags])
        assert (request.problems, request.recipe.peak_learning_rate) == ([], rate), case
        assert note in "".join(request.notes) and bool(note) == bool(request.notes), case


def test_a_mistake_in_by_objective_has_its_line_also_if_it_is_not_in_use(recipe_file):
    cases = [
        ("by_objective:\n  dop: {seed: 1}", "mine.yaml:4 by_objective.dop", "did you mean 'dpo'"),
        ("by_objective:\n  dpo:\n    sed: 3", "mine.yaml:5 by_objective.dpo.sed", "did you mean 'seed'"),
        (
            "by_method:\n  full:\n    by_objective:\n      dpo:\n        sed: 1",
            "mine.yaml:7 by_method.full.by_objective.dpo.sed",
            "did you mean 'seed'",
        ),
        (
            "by_objective:\n  dpo: {by_method: {lora: {}}}",
            "mine.yaml:4 by_objective.dpo.by_method",
            "not allowed here",
        ),
        ("by_method:\n  lora: {method: full}", "mine.yaml:4 by_method.lora.method", "not allowed here"),
        ("by_objective: {dpo: {seed: 1}}\nobjective: [dpo]", "mine.yaml:4 objective", "found ['dpo']"),
    ]
    for text, where, found in cases:
        reported = problems(recipe_file(text))
        assert set(reported) == {where} and found in reported[where], reported
