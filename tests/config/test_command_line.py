"""What a user types and writes: who wins, what is refused, and all that is wrong told at once, in place."""

import os
import re
import subprocess
import sys

import pytest

from kit.config.command_line import read_command_line
from kit.config.recipe import RECIPES, ROOT, Recipe
from kit.config.recipe_file import find_file, read_yaml
from kit.config.validation import FLAGS, load_recipe
from kit.errors import UserError

BASE = {"model_name_or_path": "some/model", "dataset": "some/data"}


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, *, base=True):
        lines = "".join(f"{key}: {value}\n" for key, value in BASE.items()) if base else ""
        (tmp_path / "mine.yaml").write_text(lines + text, encoding="utf-8")
        return ["--recipe", "mine.yaml"]

    return write


def problems(argv):
    """Each problem as ``where -> whole text``."""
    return {problem.where: str(problem) for problem in read_command_line(argv).problems}


def accepted(argv):
    request = read_command_line(argv)
    assert request.problems == []
    return request.recipe


# ---------------------------------------------------------------- who wins


def test_flags_beat_the_recipe_and_the_recipe_beats_the_defaults(recipe_file):
    argv = recipe_file("max_length: 100\nlora_r: 8\n")
    recipe = accepted([*argv, "--lora_r", "4"])
    assert (recipe.lora_r, recipe.max_length, recipe.seed) == (4, 100, Recipe.model_fields["seed"].default)


def test_the_default_recipe_serves_unless_a_model_is_named():
    assert read_command_line([]).recipe_name == "tiny"
    assert read_command_line(["--dataset", "d"]).recipe_name == "tiny"
    request = read_command_line(["--model_name_or_path", "org/Llama-3.1-8B", "--dataset", "d"])
    assert request.problems == [] and request.recipe_name == "Llama-3.1-8B"


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_steps", "7", "--use_dora"],
        ["--max-steps", "7", "--use-dora", "true"],
        ["--max_steps=7.0", "--use_dora=yes"],
        ["--use_dora", "--max-steps=7"],
    ],
)
def test_a_flag_may_be_written_in_several_ways(argv):
    recipe = accepted(argv)
    assert (recipe.max_steps, recipe.use_dora) == (7, True)


def test_launch_flags_are_no_part_of_the_recipe():
    request = read_command_line(["--config", "fsdp", "--num-processes", "4", "--dry-run"])
    launch = request.launch
    assert (launch.config, launch.num_processes, launch.dry_run, request.problems) == ("fsdp", 4, True, [])


def test_a_switch_can_be_turned_off(recipe_file):
    argv = recipe_file("gradient_checkpointing: true\n")
    assert accepted(argv).gradient_checkpointing
    assert not accepted([*argv, "--gradient_checkpointing", "false"]).gradient_checkpointing


def test_none_undoes_what_the_recipe_set(recipe_file):
    argv = recipe_file("max_steps: 5\nreport_to: [wandb]\ndataset_columns: {a: b}\n")
    recipe = accepted([*argv, "--max_steps", "none", "--report_to", "none", "--dataset_columns", "none"])
    assert (recipe.max_steps, recipe.report_to, recipe.dataset_columns) == (None, [], {})


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


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("learning_rate: 1e-4", 1e-4),
        ("learning_rate: 1.0e-4", 1e-4),
        ("max_steps: 3.0", 3),
        ("max_steps: null", None),
        ("max_steps:", None),
        ("max_steps: ~", None),
        ("model_revision: 0123", "0123"),
        ("model_revision: 1e5", "1e5"),
        ("output_dir: 2024-01-01", "2024-01-01"),
        ("report_to: wandb", ["wandb"]),
        ("report_to: [wandb, trackio]", ["wandb", "trackio"]),
        ("lora_target_modules: all-linear", "all-linear"),
        ("lora_target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("dataset_columns: {question: prompt}", {"question": "prompt"}),
        ("dataset_columns: question=prompt", {"question": "prompt"}),
        ("warmup_steps: 0.5", 0.5),
        ("eval_split_size: 200", 200),
    ],
)
def test_yaml_values_mean_what_their_author_meant(recipe_file, line, value):
    assert getattr(accepted(recipe_file(line)), line.partition(":")[0]) == value


@pytest.mark.parametrize(
    "line",
    """max_steps: true
    max_steps: yes
    lora_r: on
    learning_rate: false
    max_steps: 3.5
    max_steps: many
    max_steps: 0
    max_steps: [3]
    max_length: null
    max_length:
    lora_dropout: 1
    lora_dropout: -0.1
    learning_rate: .nan
    learning_rate: inf
    learning_rate: 0
    weight_decay: -1
    warmup_steps: 1.5
    eval_split_size: 10.5
    method: LoRA
    use_dora: maybe
    use_dora: 2
    dataset: {a: b}
    dataset: ""
    dataset: "  "
    dataset: null
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


@pytest.mark.parametrize("argv", [["--max_steps="], ["--max_steps", ""], ["--max_steps"], ["--config="]])
def test_a_flag_without_a_value_is_refused(argv):
    (text,) = problems(argv).values()
    assert "no value" in text


# ---------------------------------------------------------------- everything wrong, at once, in place


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
        "mine.yaml:10 global_batch_size": "6 or 8",
        "--num_processes": "'0'",
        "--max_length": "'x'",
        "--evl_steps": "did you mean 'eval_steps'",
        "'stray'": "--flag value",
    }
    assert set(found) == set(expected)
    for where, part in expected.items():
        assert part in found[where]
    assert read_command_line(argv).recipe is None


def test_a_value_that_flags_override_is_blamed_on_the_flag(recipe_file):
    argv = recipe_file("global_batch_size: 8\nper_device_train_batch_size: 2\n")
    assert list(problems([*argv, "--global_batch_size", "7"])) == ["--global_batch_size"]


def test_an_unreadable_recipe_is_one_problem_and_hides_no_wrong_flag():
    found = problems(["--recipe", "llama-8b-lroa", "--max_length", "x", "--eval_steps", "5"])
    assert set(found) == {"--recipe", "--max_length"}
    assert "did you mean 'llama-8b-lora'" in found["--recipe"]


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


def test_a_flag_given_twice_is_refused():
    assert "'1'" in problems(["--seed", "1", "--seed=2"])["--seed"]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("gradient_accumulation_steps", "global_batch_size"),
        ("load_in_4bit", "--method qlora"),
        ("bf16", "mixed_precision: bf16"),
        ("max_seq_length", "max_length"),
        ("deepspeed", "--config fsdp"),
    ],
)
def test_words_of_other_kits_are_answered(recipe_file, word, answer):
    assert answer in problems([f"--{word}", "1"])[f"--{word}"]
    assert answer in problems(recipe_file(f"{word}: 1"))[f"mine.yaml:3 {word}"]


def test_a_launch_flag_in_a_recipe_is_sent_to_the_command_line(recipe_file):
    assert "--num_processes" in problems(recipe_file("num_processes: 2"))["mine.yaml:3 num_processes"]


# ---------------------------------------------------------------- whatever a file holds, no traceback


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01\x00\xff\xfe",
        b"\x00\x01",
        b"- a\n- b\n",
        b"just words",
        b"a: [1, 2",
        b"a: b: c",
        b"\tseed: 1",
        b"a: 1\n---\nb: 2\n",
        b"seed: *nowhere",
        b"seed: &s [*s]",
        b"[a]: 1",
        b"{{a: b}: c}: 1",
        b"<<: {seed: 1}",
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


def test_read_yaml_gives_typed_values_and_lines(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("# c\nnum_processes: 2\n\nfsdp_config:\n  fsdp_offload_params: true\n", encoding="utf-8")
    assert read_yaml(path) == (
        {"num_processes": 2, "fsdp_config": {"fsdp_offload_params": True}},
        {"num_processes": 2, "fsdp_config": 4},
    )


def test_a_few_lines_that_unfold_to_billions_are_answered_shortly(recipe_file):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11)]
    lines += [f"{key}: *a10" for key in ("report_to", "lora_target_modules", "seed", "output_dir")]
    found = problems(recipe_file("\n".join(lines)))
    assert max(map(len, found.values())) < 500


@pytest.mark.parametrize("name", [".", "/", "recipes", "x" * 5000, "no\udcffpe", "tiny/", "../tiny"])
def test_a_path_that_is_no_recipe_is_refused(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert list(problems(["--recipe", name])) == ["--recipe"]


def test_an_empty_recipe_with_all_that_is_needed_on_the_command_line_is_fine(recipe_file):
    argv = recipe_file("# nothing\n", base=False)
    assert accepted([*argv, "--model_name_or_path", "m", "--dataset", "d"]).dataset == "d"


def test_files_are_found_by_path_name_and_stem(recipe_file, tmp_path):
    recipe_file("")
    assert find_file("tiny", RECIPES, "recipe") == find_file("tiny.yaml", RECIPES, "recipe")
    assert find_file("mine.yaml", RECIPES, "recipe").resolve() == tmp_path / "mine.yaml"


def test_load_recipe_raises_with_every_problem(recipe_file):
    recipe_file("max_steps: x\nsed: 1")
    with pytest.raises(UserError) as error:
        load_recipe("mine.yaml")
    assert [problem.where for problem in error.value.problems] == ["mine.yaml:4 sed", "mine.yaml:3 max_steps"]


# ---------------------------------------------------------------- help, and the time it takes


def run(*words, code):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)


def test_help_shows_every_flag_with_its_unit_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        read_command_line(["--seed", "1", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, info in FLAGS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  --{name} "))
        assert f"[{info.json_schema_extra['unit']}]" in line or not info.json_schema_extra["unit"]
        assert "(required)" in line or "(default: " in line
        assert info.description in text
    assert "--lora_r <whole number from 1>  (default: 16)" in text
    assert max(map(len, text.splitlines())) <= 120 and text.isascii()


def test_a_reader_of_the_help_may_leave_early():
    help_ = f"{sys.executable} -c 'from kit.config.command_line import print_help; print_help()'"
    code = f"{help_} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.stdout.split()[0] == "usage:" and done.stdout.split()[-1] == "0" and done.stderr == ""


def test_reading_a_command_line_is_quick_and_needs_nothing_heavy():
    code = """
import sys, time
start = time.process_time()
from kit.config.command_line import read_command_line
assert read_command_line(["--recipe", "llama-8b-lora"]).recipe
heavy = {"torch", "transformers", "accelerate", "numpy", "datasets", "peft"} & set(sys.modules)
print(time.process_time() - start, heavy)
"""
    done = run(code=code)
    seconds, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "set()" and float(seconds) < 0.5, done.stdout


def test_own_data_is_not_judged_by_the_evaluation_of_the_recipe_s():
    """`--dataset mine` with the default recipe: its evaluation set is about something else."""
    own = read_command_line(["--dataset", "mine.jsonl"])
    assert not own.problems and own.recipe.eval_dataset is None and not own.recipe.predict_with_generate
    split = read_command_line(["--dataset", "mine.jsonl", "--eval_split_size", "0.1"])
    assert not split.problems and split.recipe.predict_with_generate
    given = read_command_line(["--dataset", "mine.jsonl", "--eval_dataset", "theirs.jsonl"])
    assert given.recipe.eval_dataset == "theirs.jsonl" and given.recipe.eval_on_start
    assert read_command_line([]).recipe.eval_dataset.endswith("eval.jsonl")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{path: a, weight: -1}]", r"--dataset\[0\].weight: found '-1'; expected number from 0"),
        ("[{path: a, weight: much}]", r"--dataset\[0\].weight: found 'much'"),
        ("[a, {path: b, wieght: 1}]", r"--dataset\[1\].wieght: unknown key; .*\n.*did you mean 'weight'"),
        ("[{weight: 1}]", r"--dataset\[0\].path: missing"),
        ("[{path: a, columns: q}]", r"--dataset\[0\].columns: found 'q'; expected theirs=ours"),
        ("[{path: a", r"--dataset: found '\[\{path: a'"),
        ("a.jsonl,b/a.jsonl", r"two data sets of the name 'a'\n.*give each a name"),
        ("[{path: a, weight: 1}, {path: b}]", r"some weights are missing: b"),
        ("[{path: a, weight: 0}, {path: b, weight: 0}]", r"--dataset: all weights are 0"),
    ],
)
def test_a_list_of_data_sets_is_checked_entry_by_entry(value, message):
    request = read_command_line(["--model_name_or_path", "m", "--dataset", value])
    assert re.search(message, "\n".join(map(str, request.problems)))


def test_several_data_sets_are_named_from_a_flag_or_a_recipe_and_take_the_recipes_settings(tmp_path):
    expected = [("a", "train", {"q": "text"}, 2.0), ("other", "test", {}, 1.0)]
    (tmp_path / "a.jsonl").touch()
    entries = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, name: other, weight: 1, split: test, columns: {}}]"
    (tmp_path / "mine.yaml").write_text(f"model_name_or_path: m\ndataset_columns: q=text\ndataset: {entries}\n")
    flags = ["--model_name_or_path", "m", "--dataset_columns", "q=text", "--dataset", entries]
    for argv in (flags, ["--recipe", str(tmp_path / "mine.yaml")]):
        datasets = read_command_line(argv).recipe.datasets
        assert [(d.name, d.split, d.columns, d.weight) for d in datasets] == expected
    assert datasets[0].path == str(tmp_path / "a.jsonl")  # beside the recipe, like every path in it
