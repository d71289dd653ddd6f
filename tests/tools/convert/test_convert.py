"""A file is recognised, or the message says what it is; a value of a wrong kind is a message, not a traceback."""

import pytest
import yaml

from kit.config.other_kits import KITS, table_of
from kit.config.recipe import Recipe
from kit.config.validation import validate
from kit.system.errors import UserError
from kit.tools.convert.convert import convert
from kit.tools.convert.write import lines_of


def test_a_file_that_cannot_be_converted_is_refused_with_what_is_wrong(converted, tmp_path):
    for text, says in (
        ("- a\n", "key: value lines"),
        ("some: 1\n", "no file of a known kit"),
        ("model_name_or_path: m\ndataset: d\n", "kit train --recipe"),
        ("base_model: m\nbase_model: n\n", "duplicate key"),
        ("base_model: m\nsequence_len: [many]\ndatasets: [{path: d, type: chat_template}]\n", "sequence_len"),
        ("base_model: m\nmicro_batch_size: many\n", "a value of a wrong kind"),
        ("stage: sft\nfinetuning_type: [lora]\ncutoff_len: 5\n", "train nothing"),
    ):
        with pytest.raises(UserError, match=says):
            converted(text)
    with pytest.raises(UserError, match="a shell script"):
        converted("swift sft --model m\n", name="train.sh")
    with pytest.raises(UserError, match="No such file"):
        convert(tmp_path / "nowhere.yaml")


def fits(name, value):
    """Whether a setting of ours takes a value of a table."""
    as_read = yaml.load("\n".join(lines_of(name, value)), yaml.BaseLoader)
    return not validate(Recipe, as_read, {}, Recipe.model_fields)[2] & {name}


def test_each_setting_that_a_table_names_exists_and_takes_what_the_table_gives_it():
    for stem in ("common", *KITS.values()):
        table = table_of(stem)
        assert set(table["same"].values()) | set(table.get("values", {})) <= set(Recipe.model_fields)
        settings = [table.get("defaults", {}), table.get("adapter_defaults", {}), table.get("saving", {})]
        settings += table.get("by_objective", {}).values()
        settings += [chosen for values in table.get("choices", {}).values() for chosen in values.values()]
        settings += [{"chat_template": name} for name in table.get("templates", {}).values()]
        for name, value in [each for chosen in settings for each in chosen.items()]:
            assert name in ("needless", "speed", "training", "refused") or fits(name, value), (stem, name, value)
