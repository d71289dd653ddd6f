"""A file is recognised, or the message says what it is; a value of a wrong kind is a message, not a traceback."""

import re
import sys

import pytest

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.tools.convert.convert import KITS, convert


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "key: value lines"),
        ("a: [\n", "not valid YAML"),
        ("some: 1\n", "no file of a known kit"),
        ("model_name_or_path: m\ndataset: d\n", "kit train --recipe"),
        ("base_model: m\nsequence_len: [many]\ndatasets: [{path: d, type: chat_template}]\n", "max_length"),
        ("base_model: m\nmicro_batch_size: 1e400\n", "a value of a wrong kind"),
        ("base_model: m\nmicro_batch_size: many\n", "a value of a wrong kind"),
        ("base_model: m\ndatasets: 3\nsequence_len: 8\nval_set_size: {}\n", "datasets"),
        ("stage: sft\nfinetuning_type: [lora]\ncutoff_len: 5\n", "trains nothing"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_converted_is_refused_with_what_is_wrong(converted, text, says):
    with pytest.raises(UserError, match=says):
        converted(text)


def test_a_key_that_is_given_twice_is_refused(converted):
    with pytest.raises(UserError, match="second time"):
        converted("base_model: m\nbase_model: n\n")


def test_a_file_that_is_not_there_is_a_message(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        convert(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("kit", KITS)
def test_each_table_names_what_it_was_read_from(kit):
    module = sys.modules[KITS[kit].__module__]
    assert re.search(r"[Rr]ead\s+from (.*\d\.\d+|commit)", module.__doc__, re.DOTALL)


@pytest.mark.parametrize("kit", KITS)
def test_each_key_that_a_table_renames_becomes_a_setting_that_exists(kit):
    module = sys.modules[KITS[kit].__module__]
    assert set(getattr(module, "RENAMES", {}).values()) <= set(Recipe.model_fields)
