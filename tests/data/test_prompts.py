"""Prompts for GRPO: alone they have the tokens that they have before an answer."""

import json

import numpy as np
import pytest
from data_helpers import ANSWER, GOLDEN, USER, byte_level_tokenizer, open_all, recipe, write

from kit.data.chat.shipped import SHIPPED
from kit.data.open import stop_ids
from kit.preflight.rollout_checks import check_evaluation, check_references
from kit.system.errors import UserError

FLAGS = {"objective": "grpo", "rewards": ["json"], "max_length": 500, "max_new_tokens": 20, "global_batch_size": 8}
TEMPLATES = [*SHIPPED, *(str(path) for path in sorted(GOLDEN.glob("*.jinja")))]
TOKENIZER = byte_level_tokenizer(bos_token="<s>")
TURNS = [USER, ANSWER, {"role": "user", "content": "And you?"}]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    def opened(*rows, **changes):
        write(tmp_path / "train.jsonl", *rows)
        return open_all(TOKENIZER, **FLAGS | changes)

    monkeypatch.chdir(tmp_path)
    return opened


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda name: name.rpartition("/")[2])
def test_a_prompt_alone_has_the_ids_of_one_with_an_answer_and_its_answers_end_alike(opened, template):
    question = {"instruction": "And you?", "history": [["Hi", "Hello"]]}
    opens_think = "deepseek_r1" in template
    answer = ANSWER | {"content": "<think>\nA guest\n</think>\n\nHello"} if opens_think else ANSWER
    data = opened({"prompt": TURNS, "completion": [answer]}, chat_template=template)
    answered, ends = data.train.prompt(0), stop_ids(data, TOKENIZER)
    for alone in ({"messages": TURNS}, {"prompt": TURNS}, {"prompt": json.dumps(TURNS)}, question):
        data = opened(alone | {"solution": 4, "label": False}, chat_template=template)
        assert data.train.prompt(0) == (answered.ids, [])
        assert stop_ids(data, TOKENIZER) == ends


def test_a_text_alone_has_the_ids_of_one_before_a_completion(opened):
    answered = opened({"prompt": "Hi, ", "completion": "Ann"})
    assert opened({"prompt": "Hi, "}).train.prompt(0) == (answered.train.prompt(0).ids, [])
    chats = opened({"prompt": "Hi, "}, chat_template="chatml"), opened({"instruction": "Hi, "}, chat_template="chatml")
    assert chats[0].train.prompt(0) == chats[1].train.prompt(0) != answered.train.prompt(0)


def test_rows_with_and_without_an_answer_go_together_and_what_needs_one_names_the_first_row_without(opened):
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS[:1]}, {"messages": TURNS}]
    data = opened(*rows, chat_template="chatml", eval_dataset="train.jsonl")
    assert [bool(data.train.prompt(i).reference) for i in range(3)] == [True, False, False]
    assert "2 samples have no reference answer" in data.notes
    with pytest.raises(UserError, match=r"--rewards number: compares with the reference answer, and train.jsonl:2 has"):
        check_references("--rewards", ["json", "number", "overlong:8"], data.train)
    check_references("--rewards", ["json", "environment", "regex:a", "overlong:8"], data.train)
    follows = {"metric_for_best_model": "eval_exact_match", "keep_best": True, "predict_with_generate": True}
    with pytest.raises(UserError, match=r"eval_exact_match, which needs reference answers, and train.jsonl:2 has none"):
        check_evaluation(recipe(**FLAGS, eval_dataset="train.jsonl", **follows), data.evaluation)
    check_evaluation(recipe(**FLAGS, eval_dataset="train.jsonl"), data.evaluation)  # the loss on that with an answer
    with pytest.raises(UserError, match=r"no row has a reference answer, so there is no loss"):
        check_evaluation(recipe(**FLAGS), data.evaluation.select(np.array([1, 2]), "alone"))


def test_the_column_of_a_reference_answer_is_named_completion_beside_an_instruction_too(opened):
    named = opened({"instruction": "Hi", "output": "Hello"}, chat_template="chatml").train.prompt(0)
    columns = {"solution": "completion"}
    for row in ({"instruction": "Hi"}, {"prompt": [{"role": "user", "content": "Hi"}]}):
        data = opened(row | {"solution": "Hello"}, chat_template="chatml", dataset_columns=columns)
        assert data.train.prompt(0) == named


def test_of_prompt_and_completion_no_row_has_a_completion_that_others_lack(opened):
    rows = {"prompt": TURNS[:1]}, {"prompt": TURNS, "completion": [ANSWER]}
    with pytest.raises(UserError, match=r"completion: a column that the first row lacks \(at train.jsonl:2\)"):
        opened(*rows, chat_template="chatml")
    with pytest.raises(UserError, match=r"train.jsonl:2: no 'completion' .*expected prompt and completion in every"):
        opened(*rows[::-1], chat_template="chatml")


def test_a_prompt_that_is_too_long_to_evaluate_is_left_out_and_no_end_of_it_is_cut(opened):
    long = {"role": "user", "content": "Bye now " * 80}
    data = opened(
        {"prompt": TURNS}, {"prompt": [long]}, chat_template="chatml", eval_dataset="train.jsonl", max_length=100
    )
    assert len(data.train) == len(data.evaluation) == 1 and any("1 of 2" in line for line in data.notes), data.notes


def test_a_prompt_that_ends_with_an_answer_is_refused_and_sft_takes_no_prompt_alone(opened):
    with pytest.raises(UserError, match=r"train.jsonl:1 prompt: an assistant turn, last; expected a turn of the user"):
        opened({"prompt": TURNS[:2]}, chat_template="chatml")
    with pytest.raises(UserError, match=r"(?s)columns prompt; expected messages.*--objective grpo takes prompts"):
        opened({"prompt": TURNS}, objective="sft", rewards=[])
