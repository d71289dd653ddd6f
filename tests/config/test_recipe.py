"""The schema on its own: the flags that are promised, what follows from other settings, and JSON there and back."""

from kit.config.command_line import read_command_line
from kit.config.recipe import Recipe

REQUIRED = {"model_name_or_path": "m", "dataset": "d"}


def test_a_recipe_survives_the_journey_through_json():
    recipe = Recipe(**REQUIRED, dataset_columns="q=prompt,a=completion", lora_target_modules="q_proj,v_proj")
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert recipe.dataset_columns == {"q": "prompt", "a": "completion"}
    assert recipe.lora_target_modules == ["q_proj", "v_proj"]


def test_several_data_sets_are_named_from_a_flag_or_a_recipe_and_take_the_recipes_settings(tmp_path):
    expected = [("a", "train", {"q": "text"}, 2.0), ("other", "test", {}, 1.0)]
    (tmp_path / "a.jsonl").touch()
    entries = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, name: other, weight: 1, split: test, columns: {}}]"
    (tmp_path / "mine.yaml").write_text(f"model_name_or_path: m\ndataset_columns: q=text\ndataset: {entries}\n")
    flags = ["--model_name_or_path", "m", "--dataset_columns", "q=text", "--dataset", entries]
    for argv in (flags, ["--recipe", str(tmp_path / "mine.yaml")]):
        datasets = read_command_line(argv).recipe.dataset_entries
        assert [(d.name, d.split, d.columns, d.weight) for d in datasets] == expected
    assert datasets[0].path == str(tmp_path / "a.jsonl")  # beside the recipe, like every path in it


def test_evaluation_data_of_the_same_hub_id_have_its_revision_unless_they_have_their_own():
    def revisions(**settings):
        values = {"model_name_or_path": "m", "dataset": "org/a", "dataset_revision": "v1", **settings}
        return [entry.revision for entry in Recipe(**values).eval_dataset_entries]

    assert revisions(eval_dataset="org/a") == ["v1"]
    assert revisions(eval_dataset="org/b") == [None]
    assert revisions(eval_dataset=[{"path": "org/a", "revision": "v3"}, {"path": "org/a"}]) == ["v3", "v1"]
