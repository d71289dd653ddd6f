"""A model is found by folder, hub id or the name of a shipped shape; unknown models are reported."""

import json

import pytest

from kit.system.errors import UserError
from kit.tools.plan.models import SHAPES, find_shape

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


def test_a_config_without_sizes_or_of_another_family_or_damaged_is_reported(tmp_path):
    text = refused(folder_with(tmp_path, hidden_size="absent", vocab_size=0))
    assert "has no hidden_size; expected a number" in text and "vocab_size is 0" in text
    assert "do not cover the family 'deepseek_v3'" in refused(folder_with(tmp_path, model_type="deepseek_v3"))
    for damaged in ("{", "[]", ""):
        (tmp_path / "config.json").write_text(damaged)
        assert "config.json" in refused(str(tmp_path))


def test_an_unknown_model_is_reported():
    assert "did you mean 'llama-8b'?" in refused("lama-8b")
    assert "no such folder" in refused("./none") and "no such folder" in refused("a/b/c")
