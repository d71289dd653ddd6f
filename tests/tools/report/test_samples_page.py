"""What is shown is what is trained on: the very tokens, learned or not, and what is wrong with them."""

import re

import numpy as np
import pytest
from data_helpers import chat, write
from report_helpers import looked

from kit.tools.report.samples_page import as_page, as_text
from kit.tools.report.shown_samples import runs_of, tokens_of


def test_the_texts_of_the_tokens_add_up_to_the_sample_whatever_its_characters(tokenizer):
    text = "Hi <|im_start|> Ünï 🚀🇫🇷 \n\t é e\u0301 漢字"
    ids = np.array(tokenizer(text, add_special_tokens=False).input_ids)
    tokens = tokens_of(ids, np.arange(len(ids), dtype=np.float32), tokenizer)
    assert "".join(token.text for token in tokens) == text
    assert [token.text for token in tokens if token.is_special] == ["<|im_start|>"]
    assert [token.weight for token in tokens] == list(range(len(ids)))  # one for each id
    in_two = ids[:-1]  # cut within the last character
    assert "".join(token.text for token in tokens_of(in_two, in_two, tokenizer)) == text[:-1] + "\ufffd"


@pytest.mark.slow
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_runs_count_the_tokens_whatever_their_characters(train_on, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Ünï 🚀🇫🇷", "漢字 é e\u0301 🚀"))
    gathered = looked(tokenizer, chat_template="chatml", train_on=train_on)
    (sample,) = gathered.samples
    runs = runs_of(sample.tokens)
    assert sum(map(len, runs)) == sample.num_tokens
    assert sum(len(run) for run in runs if run[0].weight) == sample.num_learned
    counts = [int(count) for count in re.findall(r"<div class='run[^>]*><small>(\d+)</small>", as_page(gathered))]
    assert counts == [len(run) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "flags"),
    [
        (chat("Hi", "Hello"), {"chat_template": "llama3", "train_on": "all"}),
        ({"input_ids": [1, 5, 6, 7]}, {}),
    ],
)
def test_the_first_token_is_never_marked_as_nothing_predicts_it(row, flags, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", row)
    gathered = looked(tokenizer, **flags)
    (sample,) = gathered.samples
    first, rest = sample.tokens[0], sample.tokens[1:]
    assert first.weight == 0 and all(token.weight for token in rest)
    assert sample.num_learned == sample.num_tokens - 1 == len(rest)
    assert f"\n{first.text}[[{rest[0].text}" in as_text(gathered, colour=False)


@pytest.mark.slow
def test_what_is_learned_is_marked_and_nothing_else(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello", "Bye", "Bye now"))
    gathered = looked(tokenizer, chat_template="chatml")
    (sample,) = gathered.samples
    learned = ["".join(t.text for t in run) for run in runs_of(sample.tokens) if run[0].weight]
    assert learned == ["Hello<|im_end|>", "Bye now<|im_end|>"]
    assert sample.origin == "train.jsonl:1"
    text = as_text(gathered, colour=False)
    assert "<|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user" in text
    page = as_page(gathered)
    learned = [
        re.sub("<[^>]*>", "", run)
        for run in re.findall(r"<div class='run learned'><small>.*?</small>(.*?)</div>", page, re.S)
    ]
    assert learned == ["Hello&lt;|im_end|&gt;", "Bye now&lt;|im_end|&gt;"]


@pytest.mark.slow
def test_weights_are_shown(tmp_path, tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    messages[1]["weight"] = 0.5
    write(tmp_path / "train.jsonl", {"messages": messages})
    gathered = looked(tokenizer, chat_template="chatml")
    assert "]] x0.5" in as_text(gathered, colour=False) and "weight 0.5" in as_page(gathered)


@pytest.mark.slow
def test_the_page_holds_its_data_as_text_and_needs_nothing_else(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("<script>alert(1)</script>", "<b>&"))
    page = as_page(looked(tokenizer, chat_template="chatml"))
    assert page.count("<script") == 1 and "alert(1)</" not in page  # the kit's own
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page)
    assert page.count("<svg") == 1


def test_the_rows_of_the_table_add_up(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *({"text": "Hi" * (1 + i % 9)} for i in range(30)))
    write(tmp_path / "b.jsonl", *[{"text": "Bye"}] * 9)
    flags = {"dataset": "a.jsonl,b.jsonl", "max_length": 8, "excess_length_strategy": "drop"}
    rows = looked(tokenizer, eval_split_size=6, max_eval_samples=2, **flags).datasets
    assert [sum(row[key] for row in rows) for key in ("held out", "unused")] == [2, 4]
    assert sum(row["left out"] for row in rows) > 0
    assert all(row["rows"] == row["samples"] + row["held out"] + row["left out"] + row["unused"] for row in rows)
    assert "held out" not in looked(tokenizer, **flags).datasets[0]


def test_samples_are_spread_over_the_data_and_every_source_has_one(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *[{"text": f"text {i}"} for i in range(100)])
    write(tmp_path / "b.jsonl", {"text": "only one"})
    gathered = looked(tokenizer, 3, dataset="a.jsonl,b.jsonl")
    assert [s.origin for s in gathered.samples] == ["a.jsonl:1", "a.jsonl:51", "b.jsonl:1"]
    assert [row["data set"] for row in gathered.datasets] == ["a", "b"]
    assert gathered.datasets[0]["samples"] == 100
    assert looked(tokenizer, 0, dataset="a.jsonl,b.jsonl").samples == []


@pytest.mark.parametrize(
    ("sizes", "num", "lines"),
    [
        ([5], 9, "a1 a2 a3 a4 a5"),
        ([100], 1, "a1"),
        ([100], 4, "a1 a34 a67 a100"),
        ([2, 100, 1], 4, "a1 b33 b67 c1"),
        ([100, 1, 100], 3, "a1 b1 c100"),
        ([100, 1, 100], 4, "a1 b1 c33 c100"),
        ([1, 1, 100], 3, "a1 b1 c49"),
        ([1, 1, 1], 2, "a1 b1 c1"),  # each of them, though it is one more
    ],
)
def test_as_many_samples_are_shown_as_asked_for(sizes, num, lines, tmp_path, tokenizer):
    for name, size in zip("abc", sizes, strict=False):
        write(tmp_path / f"{name}.jsonl", *({"text": f"text {i}"} for i in range(size)))
    names = ",".join(f"{name}.jsonl" for name in "abc"[: len(sizes)])
    places = [sample.origin.replace(".jsonl:", "") for sample in looked(tokenizer, num, dataset=names).samples]
    assert " ".join(places) == lines


@pytest.mark.slow
def test_numbers_are_easy_to_read(tmp_path, tokenizer):
    folder = tmp_path / "from 2024"
    folder.mkdir()
    write(folder / "train.jsonl", *({"text": f"text {i} " * 9} for i in range(1100)), {"text": "long " * 5000})
    flags = {"dataset": f"{folder}/train.jsonl", "global_batch_size": 1100, "max_length": 4000}
    gathered = looked(tokenizer, 1101, **flags)
    assert gathered.title == "train" and gathered.notes[0] == f"{folder}/train.jsonl"
    text, page = as_text(gathered, colour=False), as_page(gathered)
    for shown in (text, page):
        assert "1,101 samples" in shown and "1 of 1,101 samples cut at 4,000 tokens" in shown
        assert "2 steps of 1,100" in shown and "train.jsonl:1101" in shown and "tokens, 3,999 learned" in shown
    assert "1,101    1,101" in text and ">1,101</td>" in page and "<h1>train</h1>" in page
    gathered = looked(tokenizer, 1, max_steps=1, **flags)
    assert "1 step of 1,100" in gathered.notes


@pytest.mark.slow
def test_of_a_very_long_sample_the_beginning_is_shown(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.shown_samples.MAX_TOKENS_SHOWN", 10)
    write(tmp_path / "train.jsonl", {"text": "Hello 🚀🚀🚀 there"})
    gathered = looked(tokenizer)
    (sample,) = gathered.samples
    more = f"{sample.num_tokens - 10} more tokens"
    assert more in as_text(gathered, colour=False) and more in as_page(gathered) and len(sample.tokens) == 10


@pytest.mark.slow
def test_data_cannot_drive_a_terminal(tmp_path, tokenizer):
    write(tmp_path / "a\x1b.jsonl", chat("\x1b[31mred\x07\x9b2J\x7f", "a\r\n\tb"))
    gathered = looked(tokenizer, dataset="a\x1b.jsonl", chat_template="chatml")
    for shown in (as_text(gathered, colour=False), as_page(gathered)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
        assert r"\x1b[31mred\x07\x9b2J\x7f" in re.sub("</?b>", "", shown) and "a\\r\n\tb" in re.sub("</?b>", "", shown)
    text = as_text(gathered, colour=True)
    assert set(re.findall(r"\x1b.{0,4}?[a-zA-Z]", text)) == {"\x1b[32m", "\x1b[2m", "\x1b[22m", "\x1b[0m"}
    assert "[[" not in text and r"a\x1b.jsonl:1" in text


def test_what_nothing_reads_is_shown_as_text_and_on_the_page(tmp_path, tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    write(tmp_path / "train.jsonl", {"messages": [messages[0] | {"id": 3}, messages[1]], "source": "web"})
    gathered = looked(tokenizer, chat_template="chatml")
    for shown in (as_text(gathered, colour=False), as_page(gathered)):
        assert "messages.id" in shown and "source" in shown and "100.0%" in shown and ": not used" not in shown
    write(tmp_path / "train.jsonl", chat("Hi", "Hello"))
    assert "not used" not in as_page(looked(tokenizer, chat_template="chatml")).lower()


def pair(prompt, chosen, rejected):
    prompt = [{"role": "user", "content": prompt}]
    answers = ([{"role": "assistant", "content": answer}] for answer in (chosen, rejected))
    return {"prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))}


def rated(prompt, completion, label):
    return {"instruction": prompt, "completion": completion, "label": label}


DPO = {"objective": "dpo", "chat_template": "chatml"}
KTO = {"objective": "kto", "chat_template": "chatml"}


def test_a_pair_is_shown_as_text(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("How is it?", "It is well today", "It is bad today"))
    gathered = looked(tokenizer, **DPO)
    shown = as_text(gathered, colour=False).partition("--- train.jsonl:1: prompt ")[2]
    lines = [line for line in shown.splitlines()[1:] if line]
    assert lines[:3] == ["<|im_start|>user", "How is it?<|im_end|>", "<|im_start|>assistant"]
    assert lines[3] == "  chosen:" and lines[5] == "  rejected:"
    for line, own in ((lines[4], "well"), (lines[6], "bad")):
        assert re.fullmatch(rf"\[\[It is ?\(\( ?{own} ?\)\) ?today<\|im_end\|>\]\]", line), line
    text = as_text(gathered, colour=True)
    assert "\x1b[32mIt is" in text and "\x1b[31mIt is" in text  # green and red
    assert re.search(r"\x1b\[1;4m ?well ?\x1b\[22;24m", text) and "((" not in text


@pytest.mark.parametrize("label", [True, False])
def test_the_label_of_an_answer_is_shown(label, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", rated("Hi", "Hello", label), rated("Ho", "Hello", label))
    gathered = looked(tokenizer, 1, **KTO)
    assert re.search(rf"train.jsonl:1: .*, label {str(label).lower()}\n", as_text(gathered, colour=False))
    assert f"\x1b[{32 if label else 31}mHello" in as_text(gathered, colour=True)
    page = as_page(gathered)
    assert f", label {str(label).lower()}</small>" in page
    kind = "run learned" if label else "run learned bad"
    assert re.search(f"<div class='{kind}'><small>2</small><b>Hello</b>", page) and "<mark>" not in page


def test_the_page_has_both_answers_side_by_side_with_what_differs(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("<script>", "It is <b>well</b> today", "It is <b>bad</b> today"))
    page = as_page(looked(tokenizer, **DPO))
    (answers,) = re.findall("<div class=answers>(.*?</div>)</div></div>", page, re.S)
    assert re.findall("<h4>(\\w+) <small>\\d+ tokens</small>", answers) == ["chosen", "rejected"]
    marks = [re.sub("<[^>]*>", "", mark) for mark in re.findall("<mark>(.*?)</mark>", answers)]
    assert [mark.strip() for mark in marks] == ["well", "bad"]
    assert "<div class='run learned bad'>" in answers and page.count("<script") == 1
    assert page.count("<svg") == 3 and "answers by their tokens: chosen" in page and "mean " in page
    for name in ("chosen", "rejected"):
        assert re.search(f"<p class=legend>.*<span class='run learned[a-z ]*'>{name}</span>", page)


def test_the_lengths_of_both_kinds_of_answers_are_drawn_over_the_same_tokens(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(pair(f"Hi {i}", "z" * 40, "q" * 10) for i in range(5)))
    gathered = looked(tokenizer, **DPO)
    (longest,) = set(gathered.answer_lengths["chosen"].tolist())
    (shortest,) = set(gathered.answer_lengths["rejected"].tolist())
    assert longest == shortest + 30
    text = as_text(gathered, colour=False)
    bars = {}
    for name, mean in (("chosen", longest), ("rejected", shortest)):
        (line,) = re.findall(f"  answers, {name}: 0 to {longest} tokens, {mean}.0 on average\n  (.*)", text)
        bars[name] = line.index("█")
    assert bars["rejected"] < bars["chosen"] == 47
    charts = as_page(gathered).split("<svg")[2:]
    places = [int(float(re.search("<path class=bar d='M([0-9.]+)", chart)[1])) for chart in charts]
    assert places[1] < places[0] / 2, "also on the page"


def test_pages_of_other_samples_say_nothing_of_pairs(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello"))
    gathered = looked(tokenizer, chat_template="chatml")
    body = as_page(gathered).partition("</style>")[2].partition("<script>")[0]
    assert not re.search("chosen|rejected|<mark>|label true|class=answers", body)
    assert "learned from</span>" in body and body.count("<svg") == 1


def test_pairs_cannot_drive_a_terminal(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("\x1b[31mred", "a\x1b[2J\r", "b\x9b2J"))
    gathered = looked(tokenizer, **DPO)
    for shown in (as_text(gathered, colour=False), as_page(gathered)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
