"""A value that our key cannot take is named: it becomes a drop or a refusal, for every key of the tables."""

import pytest
import yaml

from kit.config.fields import is_switch
from kit.config.other_kits import OTHER_KITS
from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.tools.convert import axolotl, llama_factory, llama_factory_v1, swift, trl
from kit.tools.convert.convert import convert, fits

FILES = {
    axolotl: {"base_model": "m", "datasets": [{"path": "d", "type": "chat_template"}], "sequence_len": 64},
    llama_factory: {"model_name_or_path": "m", "stage": "sft", "do_train": True, "finetuning_type": "lora"},
    llama_factory_v1: {"model": "m", "model_class": "llm", "peft_config": {"name": "lora"}},
    swift: {"model": "m", "tuner_type": "lora", "dataset": "d"},
    trl: {"model_name_or_path": "m", "dataset_name": "d", "use_peft": True},
}
WRONG = (True, "nonsense of another kit", {"a": [1]}, -7)


@pytest.mark.parametrize("kit", FILES)
def test_no_value_that_our_key_cannot_take_reaches_a_recipe(kit, tmp_path):
    """Each key of the kit's table, with each kind of value; for one kit, each word that names a setting here too."""
    words = {word for word, answer in OTHER_KITS.items() if answer.removeprefix("use ") in Recipe.model_fields}
    words = words if kit is trl else set()
    path, taken = tmp_path / "theirs.yaml", 0
    for key in {*kit.RENAMES, *words} - set(FILES[kit]):
        for value in WRONG:
            path.write_text(yaml.safe_dump(FILES[kit] | {key: value}))
            try:
                made = convert(path, flags={"dataset": "d"})
            except UserError:
                continue
            taken += 1
            for name, ours in made.draft.values.items():
                assert fits(name, ours), (key, value, name)
    assert taken  # switches take true, names of files any text


def test_the_schema_decides_what_fits():
    assert fits("new_tokens", ["<a>", "<b>"]) and fits("learning_rate", "2e-5") and fits("model_revision", 123)
    for name, info in Recipe.model_fields.items():
        assert fits(name, True) == is_switch(info), name
    assert not fits("new_tokens", [True]) and not fits("max_length", "long") and not fits("dataset_columns", 3)


def test_the_embedding_is_not_resized_and_a_mistaken_token_is_a_drop(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(FILES[axolotl] | {"resize_token_embeddings_to_32x": True, "resize_vocab": True}))
    made = convert(path)
    assert "new_tokens" not in made.draft.values
    assert {each.key for each in made.draft.left_out} == {"resize_token_embeddings_to_32x", "resize_vocab"}
    assert "which warms up for 100 steps at most" in made.text([])
    path.write_text(
        yaml.safe_dump(FILES[axolotl] | {"adapter": "lora", "tokens": True, "lora_target_parameters": ["a"]})
    )
    with pytest.raises(UserError, match="--drop lora_target_parameters,tokens"):
        convert(path)
