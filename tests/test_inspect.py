"""What is shown is what is trained on: the very tokens, learned or not, and what is wrong with them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import byte_level_tokenizer, chat, open_all, recipe, write

from kit import cli
from kit.inspect import as_page, as_text, look, runs_of, tokens_of


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def looked(tokenizer, num_samples=5, **flags):
    return look(recipe(**flags), tokenizer, open_all(tokenizer, **flags), num_samples)


def test_the_texts_of_the_tokens_add_up_to_the_sample_whatever_its_characters(tokenizer):
    text = "Hi <|im_start|> Ünï 🚀🇫🇷 \n\t é e\u0301 漢字"
    ids = np.array(tokenizer(text, add_special_tokens=False).input_ids)
    tokens = tokens_of(ids, np.arange(len(ids), dtype=np.float32), tokenizer)
    assert "".join(token.text for token in tokens) == text
    assert [token.text for token in tokens if token.is_special] == ["<|im_start|>"]


def test_what_is_learned_is_marked_and_nothing_else(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello", "Bye", "Bye now"))
    gathered = looked(tokenizer, chat_template="chatml")
    (sample,) = gathered.samples
    learned = ["".join(t.text for t in run) for run in runs_of(sample.tokens) if run[0].weight]
    assert learned == ["Hello<|im_end|>", "Bye now<|im_end|>"]
    assert sample.place == "train.jsonl:1"
    text = as_text(gathered, colour=False)
    assert "<|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user" in text
    page = as_page(gathered)
    learned = [
        re.sub("<[^>]*>", "", run)
        for run in re.findall(r"<div class='run learned'><small>.*?</small>(.*?)</div>", page, re.S)
    ]
    assert learned == ["Hello&lt;|im_end|&gt;", "Bye now&lt;|im_end|&gt;"]


def test_weights_are_shown(tmp_path, tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    messages[1]["weight"] = 0.5
    write(tmp_path / "train.jsonl", {"messages": messages})
    gathered = looked(tokenizer, chat_template="chatml")
    assert "]] x0.5" in as_text(gathered, colour=False) and "weight 0.5" in as_page(gathered)


def test_the_page_holds_its_data_as_text_and_needs_nothing_else(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("<script>alert(1)</script>", "<b>&"))
    page = as_page(looked(tokenizer, chat_template="chatml"))
    assert "<script" not in page and not re.search(r"(src|href)=['\"]?(https?:)?//", page)
    assert page.count("<svg") == 1


def checks(gathered):
    return {text: fine for fine, text in gathered.checks}


def test_what_is_as_it_should_be_is_told_apart_from_what_is_not(tmp_path, tokenizer):
    rows = [chat(f"Question {i}", f"Answer {i}") for i in range(20)]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "eval.jsonl", chat("Other", "One"))
    good = checks(looked(tokenizer, chat_template="llama3", eval_dataset="eval.jsonl"))
    assert all(good.values()), good
    write(tmp_path / "train.jsonl", *rows, rows[3])
    write(tmp_path / "eval.jsonl", rows[5])
    # cut off before the end of turn, one sample twice, one evaluated on
    bad = checks(looked(tokenizer, chat_template="llama3", eval_dataset="eval.jsonl", max_length=28))
    wrong = [text for text, fine in bad.items() if not fine]
    assert len(wrong) == 3
    assert "teach to stop" in wrong[0] and "more than once: train.jsonl:4, train.jsonl:21" in wrong[1]
    assert "1 of 1 evaluation samples" in wrong[2]


def test_samples_are_spread_over_the_data_and_every_source_has_one(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *[{"text": f"text {i}"} for i in range(100)])
    write(tmp_path / "b.jsonl", {"text": "only one"})
    gathered = looked(tokenizer, 3, dataset="a.jsonl,b.jsonl")
    assert [s.place for s in gathered.samples] == ["a.jsonl:1", "a.jsonl:51", "b.jsonl:1"]
    assert [row["data set"] for row in gathered.sources] == ["a", "b"]
    assert gathered.sources[0]["samples"] == 100
    assert looked(tokenizer, 0, dataset="a.jsonl,b.jsonl").samples == []


@pytest.fixture
def model(model_folder, tmp_path):
    write(tmp_path / "train.jsonl", *[chat(f"Question {i}", f"Answer {i}") for i in range(20)])
    return SimpleNamespace(flags=["--model_name_or_path", str(model_folder), "--dataset", "train.jsonl"])


def test_the_command_prints_and_writes_a_page(model, tmp_path, capsys):
    assert cli.main(["inspect", *model.flags, "-n", "2", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- train.jsonl:") == 2 and "page: out.html" in printed
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--datset", "x"], "--datset: unknown flag"),
        (["-n", "-1"], "-n: found -1; expected whole number from 0"),
        (["--html", "nowhere/out.html"], "--html: nowhere/out.html: No such file or directory"),
        (["--streaming", "--max_steps", "3"], "streaming: a stream cannot be looked at as a whole"),
        (["--max_length", "8"], "train.jsonl: none of 20 samples"),
    ],
)
def test_a_mistake_is_told_with_status_2(flags, message, model, capsys):
    assert cli.main(["inspect", *model.flags, *flags]) == 2
    assert message in capsys.readouterr().err


def test_what_is_prepared_is_opened_by_the_run(model, capsys, monkeypatch, tmp_path):
    assert cli.main(["prepare", *model.flags]) == 0
    printed = capsys.readouterr().out
    assert "20 samples" in printed and str(tmp_path / "cache") in printed
    monkeypatch.setattr("kit.encoder.encode_all", lambda *_: pytest.fail("tokenised again"))
    assert cli.main(["prepare", *model.flags]) == 0


def test_a_stream_has_nothing_to_prepare(model, capsys):
    assert cli.main(["prepare", *model.flags, "--streaming", "--max_steps", "3"]) == 2
    assert "nothing to prepare" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "prepare"])
def test_help_says_what_it_takes(command, capsys):
    try:
        status = cli.main([command, "--help"])
    except SystemExit as leaving:
        status = leaving.code
    assert status == 0 and "recipes/finetune.py" in capsys.readouterr().out
