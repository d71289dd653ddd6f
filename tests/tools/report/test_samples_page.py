"""What is shown is what is trained on: the tokens, supervised or masked; truncated and dropped rows are counted."""

import re

import numpy as np
from data_helpers import chat, open_all, recipe, write

from kit.tools.report.samples_page import as_page, as_text, gather_samples
from kit.tools.report.shown_samples import tokens_of

CHATML = {"chat_template": "chatml"}
DPO, KTO = {"objective": "dpo", **CHATML}, {"objective": "kto", **CHATML}


def looked(tokenizer, num_samples=5, **flags):
    data = open_all(tokenizer, **flags)
    return gather_samples(recipe(**flags), tokenizer, data, data.notes, num_samples)


def checks(gathered):
    return {text: is_ok for is_ok, text in gathered.checks}


def plain(page):
    return re.sub("<[^>]*>", "", page)


def pair(prompt, chosen, rejected):
    prompt = [{"role": "user", "content": prompt}]
    answers = ([{"role": "assistant", "content": answer}] for answer in (chosen, rejected))
    return {"prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))}


def rated(prompt, completion, label):
    return {"instruction": prompt, "completion": completion, "label": label}


def test_the_texts_of_the_tokens_add_up_to_the_sample_whatever_its_characters(tokenizer):
    text = "Hi <|im_start|> Ünï 🚀🇫🇷 \n\t é e\u0301 漢字"
    ids = np.array(tokenizer(text, add_special_tokens=False).input_ids)
    tokens = tokens_of(ids, np.arange(len(ids), dtype=np.float32), tokenizer)
    assert "".join(token.text for token in tokens) == text
    assert [token.text for token in tokens if token.is_special] == ["<|im_start|>"]
    assert [token.weight for token in tokens] == list(range(len(ids)))  # one for each id


def test_what_is_learned_is_marked_and_nothing_else(tmp_path, tokenizer):
    messages = chat("Hi", "Hello", "Bye", "Bye now")["messages"]
    messages[3]["weight"] = 0.5
    write(tmp_path / "train.jsonl", {"messages": [messages[0] | {"id": 3}, *messages[1:]], "source": "web"})
    gathered = looked(tokenizer, **CHATML)
    text = as_text(gathered, colour=False)
    assert re.findall(r"\[\[(.*?)\]\](?: (x[\d.]+))?", text) == [("Hello<|im_end|>", ""), ("Bye now<|im_end|>", "x0.5")]
    assert "<|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user" in text
    learned = re.findall("<span class='supervised'>(.*?)</span>", as_page(gathered), re.S)
    assert list(map(plain, learned)) == ["Hello&lt;|im_end|&gt;", "Bye now&lt;|im_end|&gt; x0.5"]
    write(tmp_path / "ids.jsonl", {"input_ids": [1, 5, 6, 7]})  # nothing predicts the first token
    weights = [token.weight for token in looked(tokenizer, dataset="ids.jsonl").samples[0].parts[0].tokens]
    assert weights == [0, 1, 1, 1]
    assert f"--- train.jsonl:1: {len(gathered.samples[0].parts[0].tokens)} tokens, 5 supervised" in text
    assert "not in the text: messages.id (100.0% of the rows), source (100.0% of the rows)" in text


def test_rows_that_were_cut_or_left_out_are_counted_and_skipped_ones_named_with_their_problem(tmp_path, tokenizer):
    long = [chat("Hi", "Bye now " * 30), chat("Hi " * 60, "Hello")]
    good = (chat(f"Hi {i}", "Hello") for i in range(58))
    write(tmp_path / "train.jsonl", *long, *good, {"messages": "<script>"}, "{broken")
    gathered = looked(tokenizer, 1, on_bad_row="skip", max_length=40, **CHATML)
    for counted in (
        "59 samples, median length",
        "2 of 60 samples truncated",
        "1 of 60 samples dropped",
        "skipped_rows.jsonl",
    ):
        assert counted in "".join(gathered.notes)
    assert looked(tokenizer, 0, on_bad_row="skip", max_length=40, **CHATML).samples == []
    shown = {sample.origin: sample.about for sample in gathered.samples[1:]}
    assert shown.keys() == {"train.jsonl:61", "train.jsonl:62"} and "not JSON" in shown["train.jsonl:62"]


def test_of_a_long_sample_the_beginning_and_the_end_are_shown(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.shown_samples.MAX_TOKENS", 10)
    write(tmp_path / "train.jsonl", {"text": "Hello " + "🚀" * 20 + " there"})
    gathered = looked(tokenizer)
    (part,) = gathered.samples[0].parts
    assert len(part.tokens) == 11
    for shown in (as_text(gathered, colour=False), plain(as_page(gathered))):
        assert re.search(r"Hel.*\n\.\.\. \d+ tokens \.\.\.\n.*ere", shown, re.S)


def test_samples_are_spread_over_the_data_and_every_data_set_has_one(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *[{"text": f"text {i}"} for i in range(100)])
    write(tmp_path / "b.jsonl", {"text": "only one"})
    gathered = looked(tokenizer, 3, dataset="a.jsonl,b.jsonl")
    assert [s.origin for s in gathered.samples] == ["a.jsonl:1", "a.jsonl:50", "a.jsonl:100", "b.jsonl:1"]
    assert "b: 1 samples, median length " in "".join(gathered.notes)


def test_both_answers_of_a_pair_and_the_label_of_an_answer_are_shown(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("<script>", "It is well", "It is awful"))
    gathered = looked(tokenizer, **DPO)
    chosen, rejected = as_text(gathered, colour=False).partition("  chosen:\n")[2].split("  rejected:\n")
    assert "user\n<script><|im_end|>" in chosen and "[[It is well<|im_end|>]]" in chosen
    assert "user\n<script><|im_end|>" in rejected and "[[It is awful<|im_end|>]]" in rejected
    text, page = as_text(gathered, colour=True), as_page(gathered)
    assert "\x1b[32mIt is well" in text and "\x1b[31mIt is awful" in text  # green and red
    assert "<span class='supervised bad'><b>" in page and page.count("<script") == 1
    assert "the chosen answer is the longer one in 0.0% of the pairs" in checks(gathered)
    write(tmp_path / "train.jsonl", rated("Hi", "Hello", True), rated("Ho", "Bye", False))
    gathered = looked(tokenizer, 2, **KTO)
    good, bad = as_text(gathered, colour=True).split("--- train.jsonl:")[1:]
    assert ", label true\n" in good and "\x1b[32mHello" in good and ", label false\n" in bad and "\x1b[31mBye" in bad


def test_of_prompts_what_the_model_gets_is_shown_and_only_the_expected_answer_is_marked(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *[chat("Hi", "Hello", "Bye " * num, "Bye now") for num in (1, 2, 30)])
    gathered = looked(tokenizer, objective="grpo", max_length=64, max_new_tokens=9, packing=True, **CHATML)
    text = as_text(gathered, colour=False)
    assert "assistant\nHello<|im_end|>\n<|im_start|>user" in text and "1 of 3 samples have no" in text
    assert text.count("assistant\n[[Bye now<|im_end|>]]") == 2 == text.count("[[") == text.count(" expected (")
    assert "expected answer" in as_page(gathered) and not re.search("stop|packs|supervised", text)


def test_data_cannot_drive_a_terminal_nor_a_browser(tmp_path, tokenizer):
    write(tmp_path / "a\x1b.jsonl", chat("\x1b[31mred\x07\x9b2J\x7f<script>alert(1)</script>", "a\r\n\tb"))
    gathered = looked(tokenizer, dataset="a\x1b.jsonl", **CHATML)
    for shown in (as_text(gathered, colour=False), as_page(gathered)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
        assert r"\x1b[31mred\x07\x9b2J\x7f" in plain(shown.replace("<script>", "")) and "a\\r\n\tb" in plain(shown)
    text = as_text(gathered, colour=True)
    assert set(re.findall(r"\x1b.{0,4}?[a-zA-Z]", text)) == {"\x1b[32m", "\x1b[0m"}
    assert r"a\x1b.jsonl:1" in text


def test_checks_find_common_mistakes(tmp_path, tokenizer):
    rows = [chat(f"Hi {i}", "Hello") for i in range(9)]
    write(tmp_path / "train.jsonl", *rows)
    assert all(checks(looked(tokenizer, **CHATML)).values())
    write(tmp_path / "train.jsonl", *rows, chat("Hi 4", "Hello"), chat("Bye", "A <|im_end|> B"))
    write(tmp_path / "eval.jsonl", chat("Hi 2", "Hello"), chat("No", "No"))
    wrong = {
        text for text, is_ok in checks(looked(tokenizer, eval_dataset="eval.jsonl", **CHATML)).items() if not is_ok
    }
    assert wrong == {
        "1 samples have a supervised special token within an answer: train.jsonl:11",
        "2 samples occur more than once: train.jsonl:5, train.jsonl:10",
        "1 of 2 evaluation samples are in the training data",
    }
    bos = tokenizer.bos_token_id
    write(tmp_path / "train.jsonl", *({"input_ids": [bos, bos, 300 + i, 301]} for i in range(9)))
    found = checks(looked(tokenizer))
    first = "train.jsonl:1, train.jsonl:2, train.jsonl:3, train.jsonl:4, train.jsonl:5, ..."
    assert (
        found[f"9 samples begin with <bos> twice: {first}"]
        is found[f"9 samples are not trained to stop: {first}"]
        is False
    )
