"""A model is found by folder, hub id or the name of a shipped shape; what is not one is reported."""

import json

import pytest

from kit.errors import UserError
from kit.memory.families import FAMILIES
from kit.tools.plan.models import SHAPES, find_shape, shape_of_size, shipped_id

LLAMA = json.loads((SHAPES / "llama-1b/config.json").read_text())


def folder_with(tmp_path, **changes):
    values = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


def refused(name):
    with pytest.raises(UserError) as error:
        find_shape(name)
    return str(error.value)


def test_a_folder_a_hub_id_and_a_shipped_name_give_the_same_numbers(tmp_path):
    own = find_shape(folder_with(tmp_path))
    assert find_shape("llama-1b").num_parameters == own.num_parameters
    for variant in ("Llama-3.2-1B", "Llama-3.2-1B-Instruct"):
        assert find_shape(f"meta-llama/{variant}").num_parameters == own.num_parameters


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-8b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_variants_of_a_public_model_have_its_shape(variant, name):
    assert find_shape(variant).name == name


def test_a_folder_that_is_called_model_has_the_name_of_what_it_is_in(tmp_path):
    (tmp_path / "mine/model").mkdir(parents=True)
    assert find_shape(folder_with(tmp_path / "mine/model")).name == "mine"
    assert find_shape(folder_with(tmp_path / "mine")).name == "mine"


def test_a_config_in_the_hubs_cache_beats_a_shipped_shape(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    folder_with(tmp_path, vocab_size=1000)
    monkeypatch.setattr("kit.tools.plan.models._cached", lambda name: path)
    assert find_shape("meta-llama/Llama-3.2-1B").vocab_size == 1000


def test_sizes_that_a_config_leaves_out_follow_from_the_others(tmp_path):
    shape = find_shape(folder_with(tmp_path, head_dim=None, num_key_value_heads="absent"))
    assert (shape.head_dim, shape.num_kv_heads) == (2048 // 32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "has no hidden_size; expected a number"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"model_type": "mixtral"}, "the formulas do not know the family 'mixtral'"),
        ({"model_type": None}, "the formulas do not know the family None"),
    ],
)
def test_a_config_without_sizes_or_of_another_family_is_reported(tmp_path, changes, message):
    assert message in refused(folder_with(tmp_path, **changes))


def test_all_missing_sizes_are_reported_together(tmp_path):
    text = refused(folder_with(tmp_path, hidden_size="absent", vocab_size="absent"))
    assert "no hidden_size" in text and "no vocab_size" in text


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_config_is_reported(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refused(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "its config.json is not in the cache"),
        ("lama-8b", "did you mean 'llama-8b'?"),
        ("./none", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_an_unknown_model_is_reported(name, message):
    assert message in refused(name)


@pytest.mark.parametrize("number", [3.5e8, 8e9, 30e9, 405e9])
def test_a_shape_made_from_a_number_has_about_that_number_of_parameters(number):
    assert shape_of_size(number, "x").num_parameters == pytest.approx(number, rel=0.12)


def test_every_family_has_a_shape_or_is_a_plain_relative():
    shipped = {find_shape(path.parent.name).model_type for path in SHAPES.glob("*/config.json")}
    assert set(FAMILIES) - shipped <= {"gemma", "olmo3"}
    assert shipped_id("llama-8b") == "meta-llama/Llama-3.1-8B" and shipped_id("llama-9b") is None
