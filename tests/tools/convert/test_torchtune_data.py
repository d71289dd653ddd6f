"""torchtune's builders become data sets with the columns and the text that they read."""

import pytest

from kit.tools.convert.draft import Draft
from kit.tools.convert.torchtune_data import take_data


def read(builder, tokenizer="llama3", **more):
    given = {"tokenizer._component_": f"torchtune.models.{tokenizer}.{tokenizer}_tokenizer"}
    given |= {"dataset._component_": f"torchtune.datasets.{builder}"}
    draft = Draft(given | {f"dataset.{key}": value for key, value in more.items()})
    take_data(draft)
    return draft


@pytest.mark.parametrize(
    ("builder", "more", "values"),
    [
        ("instruct_dataset", {"source": "a/b", "column_map": {"input": "q", "output": "a"}},
         {"dataset": "a/b", "dataset_columns": "q=instruction,a=output", "train_on": "assistant"}),
        ("chat_dataset", {"source": "a/b", "conversation_column": "turns", "conversation_style": "openai"},
         {"dataset": "a/b", "dataset_columns": "turns=messages"}),
        ("slimorca_dataset", {}, {"dataset": "Open-Orca/SlimOrca-Dedup"}),
        ("text_completion_dataset", {"source": "text", "data_files": ["a.txt", "b.txt"]}, {"dataset": "a.txt,b.txt"}),
        ("wikitext_dataset", {"subset": "wikitext-103-v1"},
         {"dataset": "EleutherAI/wikitext_document_level", "dataset_config": "wikitext-103-v1"}),
        ("stack_exchange_paired_dataset", {},
         {"dataset_columns": "question=prompt,response_j=chosen,response_k=rejected"}),
    ],
)  # fmt: skip
def test_a_builder_is_a_data_set_with_its_columns(builder, more, values):
    draft = read(builder, **more)
    assert not draft.left_out and not draft.problems
    assert {name: draft.values.get(name) for name in values} == values


def test_a_tokenizer_without_tags_joins_a_pair_as_plain_text():
    draft = read("instruct_dataset", "gemma", source="a/b")
    assert draft.values["dataset_columns"] == "input=prompt,output=completion"
    assert "chat_template" not in draft.values
