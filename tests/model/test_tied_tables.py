"""A head that is tied to an embedding, whatever the two are called, stays tied or is refused before loading."""

import sys

import pytest
from helpers import ROOT
from model_helpers import problems

sys.path.append(str(ROOT / "benchmarks"))
from tiny_families import make_model

TABLES = {"gpt2": "wte", "bloom": "word_embeddings", "gemma": "embed_tokens"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {family: tmp_path_factory.mktemp(family) for family in TABLES}
    for family, folder in made.items():
        make_model(family, folder)
    return made


@pytest.mark.parametrize("family", TABLES)
def test_no_adapter_stands_on_one_of_two_tied_tables(recipe, folders, family):
    for target in ("lm_head", TABLES[family], rf".*{TABLES[family]}"):
        message = problems(recipe(folders[family], lora_target_modules=[target], max_length=64))
        assert "one weight in this model: an adapter on it cannot be merged" in message
    assert problems(recipe(folders[family], max_length=64)) == ""


@pytest.mark.parametrize("family", TABLES)
def test_a_tied_table_trains_whole_only_where_the_head_follows(recipe, folders, family):
    for names in ([TABLES[family]], [TABLES[family], "lm_head"]):
        message = problems(recipe(folders[family], lora_modules_to_save=names, max_length=64))
        assert message == "" if family == "gemma" else "peft would train it without the head" in message
