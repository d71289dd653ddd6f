"""A file is recognised, or the message says what it is; a value of a wrong kind is a message, not a traceback."""

import pytest

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


@pytest.mark.parametrize("module", sorted({module.__name__ for module in KITS.values()}))
def test_each_table_names_the_version_and_the_commit_it_was_read_from(module):
    doc = next(each.__doc__ for each in KITS.values() if each.__name__ == module)
    assert " commit " in doc and "of 202" in doc
