"""Samples are made once, by as many processes as there are, and kept; what is wrong with the rows is reported."""

import os
import subprocess
import sys

import pytest
from data_helpers import (
    byte_level_tokenizer,
    chat,
    open_all,
    open_recipe_data,
    open_recipe_datasets,
    pairs,
    recipe,
    write,
)
from helpers import ROOT

from kit.data.samples import rows as encoder
from kit.system.errors import UserError


def contents(train):
    return [(train.origin(i), ids.tolist(), weights.tolist()) for i, (ids, weights) in enumerate(train)]


# Several processes


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("kit.data.read.blocks.BLOCK_BYTES", 20_000)


def many(num):
    return [chat(f"Question {i}? " * (1 + i % 5), f"Answer {i}. " * (1 + i % 7)) for i in range(num)]


@pytest.mark.slow
def test_several_processes_make_the_same_entry_as_one(tmp_path, tokenizer, cache, small_blocks):
    rows = many(600)
    rows[10] = ""
    write(tmp_path / "train.jsonl", *rows)
    files = []
    for num_processes in (1, 3):
        train = open_all(tokenizer, chat_template="chatml", dataset_num_proc=num_processes).train
        (folder,) = cache.glob("*/")
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert len(train) == 599 and train.origin(10) == "train.jsonl:12"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_start_with_a_reason(tmp_path, tokenizer, monkeypatch, small_blocks):
    write(tmp_path / "train.jsonl", *many(600))
    here, encode = os.getpid(), encoder.encode_all
    monkeypatch.setattr(
        encoder, "encode_all", lambda *all: os.kill(os.getpid(), 9) if os.getpid() != here else encode(*all)
    )
    with pytest.raises(UserError, match=r"dataset_num_proc: a process that tokenises died\n.*--dataset_num_proc 1"):
        open_all(tokenizer, chat_template="chatml", dataset_num_proc=2)


# The cache


def forbid_tokenising(monkeypatch):
    monkeypatch.setattr(encoder, "encode_all", lambda *_: pytest.fail("tokenised again"))


def test_the_second_time_comes_from_the_cache_wherever_the_file_lies(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *pairs(5))
    first = open_all(tokenizer)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    forbid_tokenising(monkeypatch)
    second = open_all(tokenizer, dataset="moved.jsonl")
    assert second.fingerprint == first.fingerprint
    assert second.train.origin(2) == "moved.jsonl:3"
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first.train, second.train, strict=True))


def test_whatever_changes_the_ids_changes_the_fingerprint(tmp_path, tokenizer, monkeypatch):
    def fingerprint(tokenizer=tokenizer, **changes):
        return open_all(tokenizer, **changes).fingerprint

    write(tmp_path / "train.jsonl", *pairs(5))
    other = byte_level_tokenizer()
    other.eos_token = "<|im_end|>"
    seen = [fingerprint(), fingerprint(max_length=16), fingerprint(chat_template="chatml"), fingerprint(other)]
    seen += [fingerprint(eval_split_size=2), fingerprint(eval_split_size=2, seed=1)]
    seen += [fingerprint(train_on="all"), fingerprint(excess_length_strategy="drop")]
    monkeypatch.setattr(encoder, "CODE_VERSION", -1)
    seen.append(fingerprint())
    write(tmp_path / "train.jsonl", *pairs(6))
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


def test_a_file_that_changes_while_it_is_read_makes_no_entry(tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *pairs(10))
    settings = recipe()
    datasets = open_recipe_datasets(settings)
    content = (tmp_path / "train.jsonl").read_text()
    write(tmp_path / "train.jsonl", *pairs(4))
    with pytest.raises(UserError, match=r"train.jsonl: changed while it was read\n.*start again"):
        open_recipe_data(settings, tokenizer, datasets=datasets)
    assert not list(cache.glob("*/entry.json"))
    (tmp_path / "train.jsonl").write_text(content)
    assert len(open_all(tokenizer).train) == 10


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {root!r}]
from data_helpers import byte_level_tokenizer, open_all
from kit.data.read import blocks
from kit.system import cache
blocks.BLOCK_BYTES = 20_000
append, added = cache.Writer.append, []

def die_after_two(self, arrays):
    added.append(append(self, arrays))
    if len(added) == 2:
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "die":
    cache.Writer.append = die_after_two
print(len(open_all(byte_level_tokenizer(), chat_template="chatml", dataset_num_proc=2).train))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is of Linux")
def test_a_start_that_is_killed_leaves_no_worker_and_the_next_one_works(tmp_path, cache):
    write(tmp_path / "train.jsonl", *many(600))
    tests = str(ROOT / "tests")
    code = KILLED.format(tests=tests, root=os.path.dirname(tests))

    def start(how):
        return subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60)

    # The helpers hold the pipe of standard output: run returns when they have gone too.
    assert "dying" in start("die").stdout and [path for path in cache.iterdir() if path.is_dir()]
    assert start("live").stdout.strip() == "600"
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


# What is reported of the rows


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"prompt": "a " * 50, "completion": "c"})
    with pytest.raises(UserError, match="none of 1 samples has a supervised token within max_length"):
        open_all(tokenizer, max_length=16)


def test_a_refusing_template_is_reported_once_with_its_origin(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *[chat("Hi", "Hello")] * 3)
    with pytest.raises(UserError) as caught:
        open_all(tokenizer)
    assert len(caught.value.problems) == 1
    assert "no chat template of its own (at train.jsonl:1 and 2 more)" in str(caught.value)


# Rows that cannot be used


def with_bad_rows(folder):
    rows = pairs(40)
    rows[17], rows[20] = {"prompt": 3, "completion": ""}, {"text": "a"}
    rows[30] = '{"prompt": '
    write(folder / "train.jsonl", *rows)
    return [i for i in range(40) if i not in (17, 20, 30)]


def test_rows_that_cannot_be_used_are_skipped_where_that_is_asked_for_and_listed(tmp_path, tokenizer, cache):
    good = with_bad_rows(tmp_path)
    opened = open_all(tokenizer, on_bad_row="skip")
    assert [opened.train.origin(k) for k in range(37)] == [f"train.jsonl:{i + 1}" for i in good]
    (note,) = [note for note in opened.notes if note.startswith("warning")]
    assert "train.jsonl: 3 of 40 rows (7.5%) cannot be used" in note and "first train.jsonl:18 prompt: a num" in note
    assert opened.describe()["sources"][0]["num_skipped"] == 3
    listed = opened.skipped_rows()
    assert [row["row"] for row in listed] == ["train.jsonl:18", "train.jsonl:21", "train.jsonl:31"]
    assert len(listed[0]["problems"]) == 1 and listed[2]["problems"][0].startswith("not JSON at column 11")


def test_skipped_rows_in_the_cache_stop_a_run_that_does_not_skip(tmp_path, tokenizer):
    with_bad_rows(tmp_path)
    with pytest.raises(UserError) as before:
        open_all(tokenizer)
    open_all(tokenizer, on_bad_row="skip")
    with pytest.raises(UserError) as after:
        open_all(tokenizer)
    assert str(after.value) == str(before.value) and "error: 3 problems" in str(after.value)
    assert str(after.value).endswith("or leave them out with --on_bad_row skip")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}', "train.json:1: not JSON at column 15"),
        ('text\na\nb\n"c\n', "train.csv:4: not a row of cells (unexpected end of data)"),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_is_never_taken_for_a_shorter_one(content, message, tmp_path, tokenizer):
    name = message.split(":")[0]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        open_all(tokenizer, dataset=name, on_bad_row="skip")
    assert message in str(caught.value)


def test_at_most_a_tenth_of_the_rows_is_skipped_but_always_one(tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *pairs(8), {}, {})
    with pytest.raises(UserError, match=r"train.jsonl: 2 of 10 rows \(20.0%\) cannot be used; expected at most 10%"):
        open_all(tokenizer, on_bad_row="skip")
    assert not list(cache.glob("*/entry.json"))
    for num_good, num_bad in ((1, 1), (18, 2)):
        write(tmp_path / "train.jsonl", *pairs(num_good), *[{}] * num_bad)
        assert len(open_all(tokenizer, on_bad_row="skip").train) == num_good
