"""torchtune's builders become data sets with the columns and the text that they read."""

import pytest

from kit.config.prompt_format import question
from kit.tools.convert.data import BARE
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


@pytest.mark.parametrize(
    ("tokenizer", "template", "before", "after"),
    [
        ("llama3", "llama3", "", ""),
        ("qwen3", "chatml", "", ""),
        ("gemma", None, "", ""),
        ("llama2", None, "[INST] ", " [/INST] "),
        ("mistral", None, "[INST] ", " [/INST] "),
    ],
)
def test_an_alpaca_row_has_its_words_in_what_the_tokenizer_writes(tokenizer, template, before, after):
    draft = read("alpaca_cleaned_dataset", tokenizer)
    assert not draft.left_out and draft.values.get("chat_template") == template
    assert (draft.template == BARE) is (template is None)
    (entry,) = draft.values["dataset"]
    words = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    expected = f"{before}{words}\n\n### Instruction:\nHi\n\n### Response:\n{after}"
    assert question(entry["prompt_format"], "Hi", "") == expected


def test_a_tokenizer_whose_text_is_not_known_is_dropped_by_name():
    assert [each.key for each in read("alpaca_dataset", "llama4").left_out] == ["tokenizer._component_"]
