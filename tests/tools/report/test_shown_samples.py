"""Of each thing that the output counts, samples are shown: cut, left out, skipped, found by a check."""

import re

import pytest
from data_helpers import chat, open_all, recipe, sentencepiece_tokenizer, write
from report_helpers import looked
from tokenizers import decoders

from kit.errors import UserError
from kit.tools.report.samples_page import as_page, as_text, gather_samples


def shown_for(gathered, key):
    return [sample for sample in gathered.shown.samples if key in sample.reasons]


def text_of(sample, is_cut):
    return "".join(token.text for token in sample.tokens if token.is_cut == is_cut)


CHATML = {"chat_template": "chatml"}


def test_samples_that_were_cut_are_shown_with_what_was_cut_off(tmp_path, tokenizer):
    rows = [chat("Hi", "Hello"), chat("Hi", "Bye now " * 30), chat("Hi " * 60, "Hello")]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, 0, max_length=40, **CHATML)
    assert gathered.samples == []
    (sample,) = shown_for(gathered, "cut")
    assert sample.origin == "train.jsonl:2" and "would be learned" in sample.remark
    assert text_of(sample, True).endswith("Bye now <|im_end|>\n") and "Hi" in text_of(sample, False)
    assert sum(not token.is_cut for token in sample.tokens) == 40 < sample.num_tokens
    assert sample.num_learned == gathered.lengths.max() - sum(not t.weight for t in sample.tokens if not t.is_cut)
    (sample,) = shown_for(gathered, "nothing-learned")
    assert sample.origin == "train.jsonl:3" and "is cut off at 40" in sample.remark and not text_of(sample, False)
    text, page = as_text(gathered, False, "cut"), as_page(gathered)
    assert "--- train.jsonl:2: " in text and "]]{{[[" in text and "train.jsonl:3" not in text.split("--html FILE")[1]
    assert "<div class='run cut'>" in page and "would be learned</small>" in page


@pytest.mark.parametrize("strategy", ["keep_end", "split"])
def test_what_the_model_never_sees_of_a_text_is_marked(strategy, tmp_path, tokenizer):
    text = "".join(f"{i} " for i in range(60))
    write(tmp_path / "train.jsonl", {"text": text}, {"text": "short"})
    gathered = looked(tokenizer, 0, max_length=40, excess_length_strategy=strategy)
    cut = shown_for(gathered, "cut")
    if strategy == "split":  # every token is in a piece
        assert cut == [] and any(reason.key == "cut" for reason in gathered.shown.reasons)
    else:
        (sample,) = cut
        assert text_of(sample, True).startswith("0 1 2 ") and "59 " in text_of(sample, False)


def test_samples_that_are_too_long_are_shown(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello"), chat("Hi", "Bye now " * 30))
    gathered = looked(tokenizer, max_length=40, excess_length_strategy="drop", **CHATML)
    (sample,) = shown_for(gathered, "too-long")
    assert sample.origin == "train.jsonl:2" and sample.num_learned == 0 and "max_length is 40" in sample.remark


def test_each_kind_of_skipped_row_is_shown_as_it_stands(tmp_path, tokenizer):
    good = [chat(f"Hi {i}", "Hello") for i in range(60)]
    bad = [{"messages": [{"role": "user", "content": f"only asked {i}"}]} for i in range(4)]
    write(tmp_path / "train.jsonl", *good, *bad, {"messages": "<script>"}, "{broken")
    gathered = looked(tokenizer, on_bad_row="skip", **CHATML)
    shown = shown_for(gathered, "skipped")
    assert [s.origin.partition(":")[2] for s in shown] == ["61", "65", "66", "62", "63"]
    assert "no assistant turn" in shown[0].remark and "only asked 0" in shown[0].row and "not JSON" in shown[2].remark
    text, page = as_text(gathered, False, "skipped"), as_page(gathered)
    assert text.count("--- train.jsonl:") == 3, "as many as wanted, the first of each problem first"
    assert "only asked 0" in text and "<script>" in text and "{&quot;messages&quot;: &quot;&lt;script&gt;" in page


def test_what_the_checks_find_is_shown(tmp_path, tokenizer):
    rows = [chat(f"Hi {i}", "Hello") for i in range(9)]
    write(tmp_path / "train.jsonl", *rows, chat("Hi 4", "Hello"), chat("Bye", "A <|im_end|> B"))
    write(tmp_path / "eval.jsonl", chat("Hi 2", "Hello"))
    gathered = looked(tokenizer, 1, eval_dataset="eval.jsonl", **CHATML)
    lines = {key: [s.origin.partition(":")[2] for s in shown_for(gathered, key)] for key in ("repeated", "leaked")}
    assert lines == {"repeated": ["5", "10"], "leaked": ["3"]}
    assert len(shown_for(gathered, "special-inside")) == 1
    write(
        tmp_path / "train.jsonl",
        *[{"input_ids": [300, 301, 302]}] * 2,
        {"input_ids": [300, 301, tokenizer.eos_token_id]},
    )
    assert [s.origin for s in shown_for(looked(tokenizer), "no-end")] == ["train.jsonl:1", "train.jsonl:2"]


def test_the_longest_the_shortest_and_the_least_learned_are_shown(tmp_path, tokenizer):
    rows = [chat("Hi " * (5 + i), "Hello") for i in range(5)]
    write(tmp_path / "train.jsonl", *rows, chat("Hi", "Bye now " * 40))
    gathered = looked(tokenizer, 1, **CHATML)
    lines = {
        key: sorted(s.origin[-1] for s in shown_for(gathered, key)) for key in ("longest", "shortest", "least-learned")
    }
    assert lines == {"longest": ["4", "5", "6"], "shortest": ["1", "2", "3"], "least-learned": ["3", "4", "5"]}


def test_the_page_has_a_button_for_each_reason_and_a_rule_that_hides_the_others(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *({"text": f"a {i}"} for i in range(9)))
    write(tmp_path / "b.jsonl", {"text": "b " * 99})
    gathered = looked(tokenizer, dataset="a.jsonl,b.jsonl", max_length=20)
    page = as_page(gathered)
    keys = re.findall(r"<input type=radio name=show id=show-([a-z0-9-]+)", page)
    assert keys[:2] == ["all", "cut"] and {"longest", "shortest", "data-1", "data-2", "spread"} <= set(keys)
    for key in keys[1:]:
        assert f":root:has(#show-{key}:checked) .sample:not(.for-{key})" in page and f" for-{key}" in page
    assert f".sample:not(.for-{keys[-1]}){{display:none}}" in page
    assert "data set a <small>3 of 9</small>" in page and page.count(">checked") == 0
    assert {key for sample in gathered.shown.samples for key in sample.reasons} == set(keys) - {"all"}
    assert len({(s.origin, s.num_tokens) for s in gathered.shown.samples}) == len(gathered.shown.samples)  # each once
    text = as_text(gathered, colour=False)
    assert "--show cut " in text and "--html FILE writes a page" in text
    with pytest.raises(UserError, match="--show: nothing: no sample of these data; expected cut, "):
        as_text(gathered, False, "nothing")


def test_a_page_of_many_long_samples_stays_small(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.shown_samples.MAX_TOKENS_IN_ALL", 3000)
    write(tmp_path / "train.jsonl", *({"text": f"{i} " * 2000} for i in range(40)))
    gathered = looked(tokenizer, 40, max_length=3000)
    assert all(len(sample.tokens) <= 256 for sample in gathered.shown.samples)
    assert "Of each sample at most 256 tokens are shown" in as_page(gathered)
    (sample, *_) = shown_for(gathered, "cut")
    assert {token.is_cut for token in sample.tokens} == {True, False}, "the place of the cut is shown"
    assert "tokens ...</p>" in as_page(gathered) and "tokens ...\n" in as_text(gathered, False, "cut")


def test_only_blocks_with_a_row_that_was_cut_or_left_out_are_parsed_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.data.read.parts.BLOCK_BYTES", 2000)
    rows = [chat(f"Hi {i}", "Hello") for i in range(300)]
    rows[200] = chat("Hi", "Bye now " * 30)
    write(tmp_path / "train.jsonl", *rows)
    data = open_all(tokenizer, max_length=60, **CHATML)
    parsed = []
    part = data.train.stores[0].source.parts[0]
    rows_of = type(part).rows
    monkeypatch.setattr(type(part), "rows", lambda self, block: parsed.append(block.first) or rows_of(self, block))
    gathered = gather_samples(recipe(max_length=60, **CHATML), tokenizer, data, data.notes, 5)
    assert [s.origin for s in shown_for(gathered, "cut")] == ["train.jsonl:201"]
    assert len(parsed) == 1


def pair(prompt, chosen, rejected):
    prompt = [{"role": "user", "content": prompt}]
    answers = ([{"role": "assistant", "content": answer}] for answer in (chosen, rejected))
    return {"prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))}


def rated(prompt, completion, label):
    answer = [{"role": "assistant", "content": completion}]
    return {"prompt": [{"role": "user", "content": prompt}], "completion": answer, "label": label}


def joined(shown):
    return "".join(token.text for token in shown.tokens)


DPO, KTO = {"objective": "dpo", **CHATML}, {"objective": "kto", **CHATML}


def test_of_a_pair_the_prompt_is_shown_once_and_what_differs_is_marked(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("How is it?", "It is well today", "It is bad today"))
    (sample,) = looked(tokenizer, **DPO).samples
    assert joined(sample) == "<|im_start|>user\nHow is it?<|im_end|>\n<|im_start|>assistant\n"
    assert not any(token.weight for token in sample.tokens)
    chosen, rejected = sample.answers
    assert joined(chosen) == "It is well today<|im_end|>\n" and joined(rejected) == "It is bad today<|im_end|>\n"
    for answer, own, other in ((chosen, "well", "bad"), (rejected, "bad", "well")):
        differing = "".join(token.text for token in answer.tokens if token.differs)
        assert own in differing and "It is" not in differing and "today" not in differing and other not in differing
        assert joined(answer)[:-1] == "".join(token.text for token in answer.tokens if token.weight)
        assert answer.num_tokens == len(answer.tokens)
    assert sample.num_learned == sum(bool(token.weight) for answer in sample.answers for token in answer.tokens)
    assert sample.about == (
        f"prompt {sample.num_tokens} tokens, chosen {chosen.num_tokens}, rejected {rejected.num_tokens}"
    )


@pytest.mark.parametrize("bos", ["", "<bos>"])
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_prompt_that_was_cut_is_shown_with_what_was_cut_off(objective, bos, tmp_path, tokenizer):
    long = "Hi " * 60 + "Bye"
    rows = [pair(long, "Hello", "Hello there"), pair("Hi", "Hello", "Bye")]
    if objective == "kto":
        rows = [rated(long, "Hello", False), rated("Hi", "Hello", True)]
    write(tmp_path / "train.jsonl", *rows)
    template = {"chat_template": "llama3"} if bos else CHATML
    flags = {"objective": objective, "max_length": 40, **template}
    gathered = looked(tokenizer, 0, **flags)
    (sample,) = shown_for(gathered, "cut")
    assert sample.origin == "train.jsonl:1"
    num_cut = sum(token.is_cut for token in sample.tokens)
    assert sample.remark == f"{num_cut} tokens of the prompt cut off, so that no answer is cut"
    kept = [token for token in sample.tokens if not token.is_cut]
    assert text_of(sample, True).count("Hi ") > 20 and (kept[0].text == "<bos>") == bool(bos)
    assert not any(token.is_cut for answer in sample.answers for token in answer.tokens)
    longest = max([answer.num_tokens for answer in sample.answers], default=0)
    assert len(kept) + longest == 40
    # What is shown as kept is what the run trains on.
    for ids, answer in zip(
        (ids for ids, _ in open_all(tokenizer, **flags).train.sequences(0)), sample.answers or [None], strict=True
    ):
        shown = "".join(token.text for token in kept) + (joined(answer) if answer else "")
        assert shown == tokenizer.decode(ids)
    assert sample.label == (False if objective == "kto" else None)
    assert "longest" in sample.reasons, "it is shown once, for all its reasons"
    text = as_text(gathered, False, "cut")
    assert "{{" in text and sample.remark in text and f'"{sample.origin}"' not in text


@pytest.mark.parametrize("strategy", ["truncate", "drop"])
def test_pairs_that_were_left_out_are_shown_with_the_reason(strategy, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", pair("Hi", "Hello", "Bye"), pair("Hi " * 9, "Bye now " * 30, "Hello"))
    flags = {"max_length": 40, "excess_length_strategy": strategy}
    (sample,) = shown_for(looked(tokenizer, **DPO, **flags), "too-long")
    chosen, rejected = sample.answers
    assert sample.origin == "train.jsonl:2" and sample.num_learned == 0
    num_tokens = sample.num_tokens + max(chosen.num_tokens, rejected.num_tokens)
    assert f"left out: {num_tokens} tokens, max_length is 40" in sample.remark
    assert ("leaves no room for a prompt" in sample.remark) == (strategy == "truncate")
    assert all(token.is_cut for shown in (sample, chosen, rejected) for token in shown.tokens)


def test_pairs_that_cannot_be_used_are_shown_as_they_stand(tmp_path, tokenizer):
    rows = [pair(f"Hi {i}", "Hello", "Bye") for i in range(20)]
    write(tmp_path / "train.jsonl", *rows, pair("Hi", "same", "same"))
    (sample,) = shown_for(looked(tokenizer, on_bad_row="skip", **DPO), "skipped")
    assert "rejected: the same tokens as chosen" in sample.remark and '"chosen": [{"role": "assistant"' in sample.row


def test_pairs_whose_one_answer_is_longer_are_shown_the_largest_difference_first(tmp_path, tokenizer):
    lengths = [(1, 2), (9, 1), (3, 1), (5, 1), (7, 1), (2, 2)]
    rows = [pair(f"Hi {i}", "z" * first, "q" * second) for i, (first, second) in enumerate(lengths)]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, 0, **DPO)
    lines = {k: {s.origin[-1] for s in shown_for(gathered, k)} for k in ("chosen-longer", "rejected-longer")}
    assert lines == {"chosen-longer": {"2", "4", "5"}, "rejected-longer": {"1"}}
    assert {r.key: r.count for r in gathered.shown.reasons if "longer" in r.key} == {
        "chosen-longer": 4,
        "rejected-longer": 1,
    }
    lengths = open_all(tokenizer, **DPO).train.sequence_lengths
    assert gathered.lengths.tolist() == lengths.max(axis=1).tolist()
    assert {s.origin[-1] for s in shown_for(gathered, "longest")} == {"2", "4", "5"}


def test_answers_of_either_label_can_be_shown(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(rated(f"Hi {i}", "Hello", i % 3 == 0) for i in range(9)))
    gathered = looked(tokenizer, 0, **KTO)
    for label in (True, False):
        shown = shown_for(gathered, f"label-{str(label).lower()}")
        assert len(shown) == 3 and all(sample.label is label for sample in shown)
        assert f", label {str(label).lower()}" in shown[0].about
    text = as_text(gathered, False, "label-false")
    assert text.count("--- train.jsonl:") == 3 and re.search("--show label-false +label false +6\n", text)


def test_of_a_very_long_pair_all_parts_are_shown_and_compared(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.shown_samples.MAX_TOKENS_SHOWN", 60)
    answer = " ".join(map(str, range(60)))
    write(tmp_path / "train.jsonl", pair("Hi " * 40 + "end", f"{answer} z", f"{answer} q"))
    gathered = looked(tokenizer, 1, **DPO)
    (sample,) = gathered.samples
    assert len(sample.tokens) == 20 and joined(sample).endswith("assistant\n") and "end" in joined(sample)
    for answer in sample.answers:
        assert len(answer.tokens) == 20 < answer.num_tokens and not any(token.differs for token in answer.tokens)
    page = as_page(gathered)
    assert page.count(f"{sample.answers[0].num_tokens - 20} more tokens") == 2 and "tokens ...</p>" in page


def test_every_pair_that_is_shown_says_what_was_cut(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(pair("Hi " * (50 + i), "Hello", "Bye") for i in range(8)))
    gathered = looked(tokenizer, 8, max_length=40, **DPO)
    assert len(gathered.samples) == 8 > gathered.shown.per_reason
    assert all("of the prompt cut off" in sample.remark for sample in gathered.samples)


def test_of_a_very_long_prompt_the_end_of_what_was_cut_is_shown(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.tools.report.shown_samples.MAX_TOKENS_SHOWN", 60)
    write(tmp_path / "train.jsonl", pair("Hi " * 200, "Hello", "Bye"))
    (sample,) = shown_for(looked(tokenizer, 0, max_length=100, **DPO), "cut")
    is_cut = [token.is_cut for token in sample.tokens]
    assert len(is_cut) == 20 and all(is_cut[:10]), "the beginning"
    assert is_cut[10] and not is_cut[-1], "and where the tokens begin that are kept"


def test_the_longest_pair_is_the_one_with_the_longest_answer(tmp_path, tokenizer):
    rows = [pair(f"Hi {i}", "z" * 30, "q" * 30) for i in range(4)] + [pair("Hi 4", "z" * 40, "q")]
    write(tmp_path / "train.jsonl", *rows)
    gathered = looked(tokenizer, 0, **DPO)
    assert "train.jsonl:5" in {sample.origin for sample in shown_for(gathered, "longest")}
    assert gathered.datasets[0]["longest"] == gathered.lengths.max() == gathered.lengths[4]


def test_an_answer_begins_as_it_does_behind_its_prompt(tmp_path):
    tokenizer = sentencepiece_tokenizer("metaspace")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")  # drops the first space of a text
    write(tmp_path / "train.jsonl", {"prompt": "Hi", "chosen": " is 42", "rejected": " 42"})
    (sample,) = looked(tokenizer, objective="dpo").samples
    whole = [joined(sample) + joined(answer) for answer in sample.answers]
    sequences = open_all(tokenizer, objective="dpo").train.sequences(0)
    assert whole == [tokenizer.decode(ids) for ids, _ in sequences] and joined(sample.answers[0]).startswith(" is")
