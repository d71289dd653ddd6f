"""The data of a run: every dataset checked at once, mixed as asked, held out the same way each time."""

import copy

import numpy as np
import pytest
from data_helpers import (
    open_all,
    pairs,
    rated_answers,
    write,
)

from kit.data import open as data
from kit.system.errors import UserError


def test_bad_lines_of_all_data_sets_are_reported_together_up_to_a_limit(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(1), *["{"] * 15)
    write(tmp_path / "more.jsonl", *pairs(1), '{"prompt": "a"}')
    write(tmp_path / "eval.jsonl", *pairs(1), "{")
    with pytest.raises(UserError) as caught:
        open_all(tokenizer, dataset="train.jsonl,more.jsonl", eval_dataset="eval.jsonl")
    text = str(caught.value)
    assert [f"train.jsonl:{n}:" in text for n in (2, 11, 12)] == [True, True, False]
    assert "train.jsonl: ... and 5 more problems" in text
    assert "more.jsonl:2: no 'completion'" in text and "eval.jsonl:2:" in text


def test_a_model_that_has_no_embedding_for_the_token_of_padding_is_refused(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(1))
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"eos_token": "<new>"})
    with pytest.raises(UserError, match=rf"EOS of its tokenizer has id {len(tokenizer)}, but the model has"):
        open_all(other, vocab_size=len(tokenizer))


# Evaluation data


def test_a_held_out_share_is_the_same_each_time_and_apart_from_the_rest(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(20))
    opened = open_all(tokenizer, eval_split_size=0.25)
    assert (len(opened.train), len(opened.evaluation)) == (15, 5)
    held_out = [opened.evaluation.origin(i) for i in range(5)]
    assert not set(held_out) & {opened.train.origin(i) for i in range(15)}
    again = open_all(tokenizer, eval_split_size=5, max_eval_samples=3)
    assert [again.evaluation.origin(i) for i in range(3)] == held_out[:3]
    assert opened.describe()["evaluation"]["num_samples"] == 5


def test_what_one_row_became_is_held_out_together(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(map(str, rng.integers(10**6, size=60)))} for _ in range(20)]
    write(tmp_path / "train.jsonl", *rows)
    opened = open_all(tokenizer, max_length=32, excess_length_strategy="split", eval_split_size=5)
    sides = [{samples.origin(i) for i in range(len(samples))} for samples in (opened.train, opened.evaluation)]
    assert [len(side) for side in sides] == [15, 5] and not sides[0] & sides[1]
    assert len(opened.evaluation) > 20 and not [line for line in opened.notes if "warning" in line]


def test_the_first_training_samples_are_taken_after_a_split_and_of_every_data_set(tmp_path, tokenizer):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *pairs(20, name))
    opened = open_all(tokenizer, dataset="a.jsonl", max_train_samples=7)
    assert [opened.train.origin(i) for i in range(len(opened.train))] == [f"a.jsonl:{i}" for i in range(1, 8)]
    assert "training on the first 7 of 20 samples" in opened.notes and opened.order.num_items(0) == 7
    both = [open_all(tokenizer, dataset="a.jsonl", eval_split_size=5, max_train_samples=num) for num in (None, 7)]
    assert both[0].evaluation.fingerprint == both[1].evaluation.fingerprint and len(both[1].train) == 7
    mixed = open_all(tokenizer, dataset="a.jsonl,b.jsonl", max_train_samples=4)
    assert mixed.train.dataset_ids.tolist() == [0, 0, 1, 1]


def test_settings_that_the_data_do_not_fit_are_refused(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(20))
    write(tmp_path / "b.jsonl", *pairs(20, "b"))
    write(tmp_path / "text.jsonl", *[{"text": "Hello"}] * 2)
    write(tmp_path / "ids.jsonl", *[{"input_ids": [5, 6, 7]}] * 2)
    asks = {"predict_with_generate": True, "eval_split_size": 1}
    for flags, message in (
        ({"dataset": "a.jsonl", "eval_split_size": 0.01}, "0.01 of 20 samples leaves nothing to evaluate on"),
        ({"dataset": "a.jsonl", "eval_split_size": 20}, "20 of 20 samples leaves nothing to train on"),
        ({"dataset": "a.jsonl,b.jsonl", "max_train_samples": 1}, "max_train_samples: nothing of b is left to train on"),
        ({"dataset": "text.jsonl", **asks}, "predict_with_generate: text.jsonl is plain text, which has no prompts"),
        ({"dataset": "ids.jsonl", **asks}, "predict_with_generate: ids.jsonl is token ids, which has no prompts"),
        (
            {"dataset": "text.jsonl", "system_prompt": "Be brief."},
            "given, but text.jsonl holds text, which has no message",
        ),
    ):
        with pytest.raises(UserError) as caught:
            open_all(tokenizer, **flags)
        assert message in str(caught.value)


def test_evaluation_samples_that_are_in_the_training_data_are_counted(tmp_path, tokenizer):
    rows = [{"prompt": f"Question {i}? ", "completion": f"Answer {i}"} for i in range(20)]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "eval.jsonl", rows[1], rows[2], {"prompt": "Question 99? ", "completion": "Answer 99"})
    notes = open_all(tokenizer, eval_dataset="eval.jsonl").notes
    assert "warning: 2 of 3 evaluation samples are in the training data" in notes


# Preferences

USER = {"role": "user", "content": "Hi"}
HELLO, AWAY = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "Go away"}
RATED = rated_answers(9)


def test_good_and_bad_answers_are_counted_and_a_single_one_is_refused(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *RATED)
    opened = open_all(tokenizer, objective="kto")
    assert opened.notes[0].endswith("; good answers: 6, bad ones: 3")
    assert opened.mismatched(opened.train) is not None
    write(tmp_path / "train.jsonl", *(row for row in RATED if row["label"]))
    assert open_all(tokenizer, objective="kto").notes[1].startswith("warning: there is no bad answer")
    write(tmp_path / "train.jsonl", RATED[0])
    with pytest.raises(UserError, match=r"train.jsonl: a single sample; expected at least two"):
        open_all(tokenizer, objective="kto")


def test_from_a_pair_the_chosen_answer_is_generated_and_answers_end_with_their_stop_token(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"prompt": [USER], "chosen": [HELLO], "rejected": [AWAY]})
    opened = open_all(tokenizer, objective="dpo", chat_template="chatml", predict_with_generate=False)
    prompt, reference = opened.train.prompt(0)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(reference) == "Hello<|im_end|>"
    assert data.stop_ids(opened, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_a_system_prompt_stands_before_conversations_that_have_none(tmp_path, tokenizer):
    own = [{"role": "system", "content": "Be kind."}]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    write(tmp_path / "train.jsonl", {"messages": turns}, {"messages": own + turns})
    write(tmp_path / "written.jsonl", {"messages": [{"role": "system", "content": "Be brief."}, *turns]})
    opened = open_all(tokenizer, chat_template="chatml", system_prompt="Be brief.", eval_dataset="written.jsonl")
    texts = [tokenizer.decode(opened.train[i][0]) for i in range(2)]
    assert texts[0] == tokenizer.decode(opened.evaluation[0][0]) and "Be brief." in texts[0]
    assert "Be kind." in texts[1] and "Be brief." not in texts[1]
    assert opened.train[0][1].tolist() == opened.evaluation[0][1].tolist()  # the message is masked
    assert opened.fingerprint != open_all(tokenizer, chat_template="chatml").fingerprint


def test_a_system_prompt_that_the_template_leaves_out_is_refused(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(2))
    template = "{% for m in messages if m.role != 'system' %}{{ m.content + eos_token }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(UserError, match="the template leaves its text out"):
        open_all(tokenizer, system_prompt="Be brief.", chat_template="mine.jinja")
