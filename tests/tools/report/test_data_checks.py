"""Common mistakes in training data are found in the token ids, and what is right is reported as right."""

import re

import pytest
from data_helpers import byte_level_tokenizer, chat, write
from report_helpers import checks, looked
from tokenizers.processors import TemplateProcessing

from kit.tools.report.samples_page import as_text


def test_good_data_and_bad_data_get_different_verdicts(tmp_path, tokenizer):
    rows = [chat(f"Question {i}", f"Answer {i}") for i in range(20)]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "eval.jsonl", chat("Other", "One"))
    good = checks(looked(tokenizer, chat_template="llama3", eval_dataset="eval.jsonl"))
    assert set(good.values()) == {"ok"}, good
    write(tmp_path / "train.jsonl", *rows, rows[3])
    write(tmp_path / "eval.jsonl", rows[5])
    # cut off before the end of turn, one sample twice, one evaluated on
    bad = checks(looked(tokenizer, chat_template="llama3", eval_dataset="eval.jsonl", max_length=28))
    wrong = [text for text, verdict in bad.items() if verdict == "look"]
    assert len(wrong) == 3
    assert "teach to stop" in wrong[0] and wrong[1] == "2 samples are the same: train.jsonl:4, train.jsonl:21"
    assert "1 of 1 evaluation samples" in wrong[2]


def test_a_leak_is_reported_once(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(chat(f"Question {i}", f"Answer {i}") for i in range(3)))
    write(tmp_path / "eval.jsonl", chat("Question 1", "Answer 1"))
    text = as_text(looked(tokenizer, chat_template="chatml", eval_dataset="eval.jsonl"), colour=False)
    assert text.count("evaluation samples are in the training data") == 1 and "warning" not in text
    assert "  LOOK  1 of 1 evaluation samples" in text


@pytest.mark.parametrize(
    ("numbers", "finding"),
    [
        ([1, 2, 3], "no sample occurs twice"),
        ([1, 2, 2, 2], "3 samples are the same: train.jsonl:2, train.jsonl:3, train.jsonl:4"),
        ([1, 1, 2, 2], "4 samples occur more than once: train.jsonl:1, train.jsonl:2, train.jsonl:3, train.jsonl:4"),
        (
            [1, 2, 3] * 4,
            f"12 samples occur more than once: {', '.join(f'train.jsonl:{line}' for line in range(1, 6))}, ...",
        ),
    ],
)
def test_samples_that_are_the_same_are_named(numbers, finding, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(chat(f"Question {i}", f"Answer {i}") for i in numbers))
    verdict = "ok" if len(set(numbers)) == len(numbers) else "look"
    assert checks(looked(tokenizer, chat_template="chatml"))[finding] == verdict


@pytest.mark.slow
def test_a_template_without_bos_is_fine_unless_the_tokenizer_would_write_one(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello"))
    found = checks(looked(tokenizer, chat_template="chatml"))
    assert found["no sample begins with <bos>: the template writes none"] == "ok"
    assert not [text for text in found if "twice" in text and "begin" in text]
    adds_bos = byte_level_tokenizer(bos_token="<bos>")
    adds_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", adds_bos.bos_token_id)]
    )
    found = checks(looked(adds_bos, chat_template="chatml"))
    assert found["no sample begins with <bos>, which the tokenizer puts before any other text"] == "look"
    write(tmp_path / "train.jsonl", {"text": "Hello"})
    assert checks(looked(adds_bos))["1 of 1 samples begin with <bos>"] == "ok"


def test_pieces_of_a_split_text_need_not_begin_or_end_like_a_text(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"text": "Hello there, how are you? " * 20})
    found = checks(looked(tokenizer, max_length=32, excess_length_strategy="split"))
    assert "look" not in found.values()
    notes = [text for text, verdict in found.items() if verdict == "note"]
    assert len(notes) == 2 and all("as excess_length_strategy split makes pieces" in text for text in notes)
    assert "begin with <bos>" in notes[0] and "teach to stop" in notes[1]


@pytest.mark.slow
def test_last_tokens_that_are_next_to_none_are_not_listed(tmp_path, tokenizer):
    end = tokenizer.eos_token_id
    write(
        tmp_path / "train.jsonl", *({"input_ids": [5, 6, i % 50, end]} for i in range(3000)), {"input_ids": [5, 6, 7]}
    )
    (found,) = (text for text in checks(looked(tokenizer)) if "teach to stop" in text)
    assert found.endswith("the last token learned is '<|endoftext|>' 100.0%")


@pytest.mark.parametrize(
    ("answer", "flags", "fine"),
    [
        ("Well.", {}, True),
        ("Well.<|im_end|>", {}, False),  # a second end, as of texts that went through a template before
        ("Say <|endoftext|> to stop", {}, False),
        ("Begin with <bos>", {}, False),
        ("<tool_call>{}</tool_call>", {}, True),  # special, and part of an answer
        ("Well.<|im_end|>", {"train_on": "all"}, True),  # in which ends of turns are learned anywhere
    ],
)
def test_a_special_token_that_someone_typed_into_an_answer_is_found(answer, flags, fine, tmp_path, tokenizer):
    turns = chat("One", "Good", "Two", "Better"), chat("Hi", answer), chat("Ho <|im_end|>", "Hum")
    write(tmp_path / "train.jsonl", *turns)
    found = checks(looked(tokenizer, chat_template="chatml", **flags)).items()
    token = (re.findall("<[|a-z_]+>", answer) or [""])[0]
    text = f"1 sample learns a special token in the middle of an answer, first train.jsonl:2 ({token!r})"
    assert ((text, "look") in found) != fine
    if not flags:
        assert (("no answer goes on after a special token that ends a text", "ok") in found) == fine


def test_whole_texts_have_no_answers_to_check(tmp_path, tokenizer):
    end = tokenizer.eos_token_id
    write(tmp_path / "train.jsonl", {"input_ids": [5, end, 6, end]}, {"input_ids": [6, end, 5, end]})
    assert checks(looked(tokenizer))["no answer goes on after a special token that ends a text"] == "ok"


def test_what_was_cut_is_named(tmp_path, tokenizer):
    lengths = [3, 9, 8, 9, 9]  # the third has just the length of those that were cut, and its own end
    ids = [[5 + n] * (length - 1) + [tokenizer.eos_token_id] for n, length in enumerate(lengths)]
    write(tmp_path / "train.jsonl", *({"input_ids": sample} for sample in ids))
    found = checks(looked(tokenizer, max_length=8))
    assert found["3 cut at 8 tokens, first: train.jsonl:2, train.jsonl:4, train.jsonl:5"] == "note"
    assert not [text for text in checks(looked(tokenizer, max_length=9)) if "cut" in text]


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


DPO = {"objective": "dpo"}


def test_both_answers_of_a_pair_are_checked(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("Q:", " one two", " three"), pair("P:", " one", " two <|endoftext|> three"))
    gathered = looked(tokenizer, **DPO)
    text = "1 sample learns a special token in the middle of an answer, first train.jsonl:2 ('<|endoftext|>')"
    assert checks(gathered)[text] == "look"
    assert checks(gathered)["100.0% of the answers teach to stop; the last token learned is '<|endoftext|>' 100.0%"]
    write(tmp_path / "train.jsonl", pair("Q:", " one two", " three"))
    good = checks(looked(tokenizer, **DPO))  # the end of the chosen answer is not in the middle of anything
    assert good["no answer goes on after a special token that ends a text"] == "ok" and "look" not in good.values()


def test_a_pair_begins_with_bos_once(tmp_path):
    adds_bos = byte_level_tokenizer(bos_token="<bos>")
    adds_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", adds_bos.bos_token_id)]
    )
    write(tmp_path / "train.jsonl", pair("Q:", " one", " two"))
    found = checks(looked(adds_bos, **DPO))
    assert found["1 of 1 samples begin with <bos>"] == "ok" and found["none begins with it twice"] == "ok"


def test_prompts_of_pairs_that_were_cut_are_counted(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("Q " * 40, " one", " two"), pair("Q:", " one", " two"))
    found = checks(looked(tokenizer, max_length=20, **DPO))
    assert found["1 with the start of the prompt cut off, to have at most 20 tokens"] == "note"


def test_a_pair_that_occurs_twice_and_one_that_is_evaluated_on_are_found(tmp_path, tokenizer):
    rows = [pair("Q:", " one", " two"), pair("P:", " one", " two"), pair("Q:", " one", " two")]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "eval.jsonl", rows[1], pair("R:", " one", " two"))
    found = checks(looked(tokenizer, eval_dataset="eval.jsonl", **DPO))
    assert found["2 samples are the same: train.jsonl:1, train.jsonl:3"] == "look"
    assert found["1 of 2 evaluation samples are in the training data (1 token for token)"] == "look"
