"""Data as users have it: what is wrong with it is told; what is right is cut, ordered and dealt as promised."""

import errno
import json
import multiprocessing
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_chat import byte_level_tokenizer, chat

from kit import data, samples
from kit.config import Recipe
from kit.data import (
    collate,
    evaluation_batches,
    micro_batches,
    open_data,
    open_sources,
    prompt_and_reference,
    sample_ids,
    total_steps,
)
from kit.errors import UserError
from kit.sources import choose_fields, open_source

VOCAB_SIZE = 1000


def open_all(recipe, tokenizer, vocab_size):
    return open_data(recipe, open_sources(recipe), tokenizer, vocab_size)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "samples"


def recipe(**changes):
    return Recipe(**{"model_name_or_path": "model", "dataset": "train.jsonl", **changes})


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def pairs(num):
    """Of ever different length."""
    return [{"prompt": f"Q{i} ", "completion": "a " * (1 + i * 7 % 11) + str(i)} for i in range(num)]


@pytest.fixture
def many(tmp_path, tokenizer):
    def make(num):
        write(tmp_path / "train.jsonl", *pairs(num))
        return open_all(recipe(), tokenizer, VOCAB_SIZE).train

    return make


# Reading and validating

BAD_LINES = [
    ('{"prompt": "a", "completion": }', r"train.jsonl:2: not JSON at column 31"),
    ("[1, 2]", r"train.jsonl:2: a JSON list; expected an object"),
    (f'{{"prompt": {"1" * 5000}}}', r"train.jsonl:2: Exceeds the limit .*5000 digits; expected one JSON object a line"),
    ({"prompt": "a"}, r"train.jsonl:2: no 'completion' \(it has prompt\)"),
    ({"text": "a"}, r"train.jsonl:2: no 'prompt' and no 'completion' \(it has text\)"),
    ({"prompt": "a", "completion": None}, r"train.jsonl:2 completion: missing"),
    ({"prompt": 3, "completion": "b"}, r"train.jsonl:2 prompt: a int; expected text"),
    ({"prompt": "a", "completion": " "}, r"train.jsonl:2 completion: empty"),
    ('{"prompt": "a", "completion": "\\ud800"}', r"train.jsonl:2 completion: half of a surrogate pair"),
    ({"prompt": [], "completion": "b"}, r"prompt is a list, completion a str"),
    ({"prompt": [], "completion": []}, r"train.jsonl:2 prompt: empty"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(line, message, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(1), line, *pairs(1))
    with pytest.raises(UserError, match=message):
        open_all(recipe(), tokenizer, VOCAB_SIZE)


BAD_MESSAGES = [
    ("Hi", r"messages: a str; expected a list of messages"),
    ([], r"messages: empty"),
    (["Hi"], r"messages\[0\]: a str; expected an object with role and content"),
    ([{"role": "user", "content": "Hi"}], r"messages: no assistant turn"),
    ([{"role": "asistant", "content": "Hi"}], r"messages\[0\].role: found 'asistant'; .*\n.*did you mean 'assistant'"),
    ([{"content": "Hi"}], r"messages\[0\].role: missing"),
    ([{"role": "assistant"}], r"messages\[0\].content: missing"),
    ([{"role": "assistant", "content": ["Hi"]}], r"messages\[0\].content: a list; expected text"),
]


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES)
def test_bad_messages_are_named(messages, reason, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello"), {"messages": messages})
    with pytest.raises(UserError, match=f"train.jsonl:2 {reason}"):
        open_all(recipe(chat_template="chatml"), tokenizer, VOCAB_SIZE)


def test_invalid_utf8_is_named_by_line(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: not UTF-8 at byte 11 of the line"):
        open_all(recipe(), tokenizer, VOCAB_SIZE)


def test_all_bad_lines_of_both_sets_are_told_at_once_but_not_endlessly(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(1), *["{"] * 15)
    write(tmp_path / "eval.jsonl", *pairs(1), "{")
    with pytest.raises(UserError) as caught:
        open_all(recipe(eval_dataset="eval.jsonl"), tokenizer, VOCAB_SIZE)
    text = str(caught.value)
    assert [f"train.jsonl:{n}:" in text for n in (2, 11, 12)] == [True, True, False]
    assert "train.jsonl: ... and 5 more problems" in text
    assert "eval.jsonl:2:" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "train.jsonl: no rows"),
        ("\n\n", "train.jsonl: no rows"),
        ("{\n{\n", "train.jsonl:1: not JSON.*\n.*train.jsonl:2: not JSON"),
        ('[\n{"text": "a"}]', "one JSON array; expected one JSON object a line"),
        ('{"question": "a", "answer": "b"}', "columns question, answer; expected messages, or prompt and completion"),
    ],
)
def test_a_file_without_a_usable_row(content, message, tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        open_all(recipe(), tokenizer, VOCAB_SIZE)


def test_blank_lines_are_skipped_and_counted_and_places_stay_right(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", "", {"text": "a b"}, "  ", {"text": "c d"})
    opened = open_all(recipe(), tokenizer, VOCAB_SIZE)
    assert [opened.train.place(i) for i in range(2)] == ["train.jsonl:2", "train.jsonl:4"]
    assert "train.jsonl: 2 blank lines skipped" in opened.notes


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a b"}\r\n{"text": "c d"}\r\n')
    assert len(open_all(recipe(), tokenizer, VOCAB_SIZE).train) == 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "promt"}, "'promt' is no field; .*\n.*did you mean 'prompt'"),
        ({"questions": "prompt"}, "has no column 'questions'; expected one of question, answer\n.*'question'"),
        ({"question": "prompt", "answer": "prompt"}, "prompt is given twice"),
        ({"question": "prompt"}, "columns question, answer; expected messages, or prompt and completion, or text"),
    ],
)
def test_a_wrong_column_mapping_is_told(columns, message, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"question": "a", "answer": "b"})
    with pytest.raises(UserError, match=message):
        open_all(recipe(dataset_columns=columns), tokenizer, VOCAB_SIZE)


def test_named_columns_choose_the_format(tmp_path):
    write(tmp_path / "train.jsonl", {"messages": "unrelated", "text": "a", "question": "b", "answer": "c"})
    source = open_source("train.jsonl", "train", "dataset")
    assert choose_fields(source, {}) == {"messages": "messages"}
    mapped = choose_fields(source, {"question": "prompt", "answer": "completion"})
    assert mapped == {"prompt": "question", "completion": "answer"}


def test_an_evaluation_set_with_our_columns_needs_no_mapping(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"question": "a", "answer": "b"})
    write(tmp_path / "ours.jsonl", {"prompt": "a", "completion": "b"})
    write(tmp_path / "partly.jsonl", {"question": "a", "completion": "b"})
    write(tmp_path / "other.jsonl", {"question": "a", "text": "b"})

    def fields(dataset, eval_dataset):
        columns = {"question": "prompt", "answer": "completion"}
        opened = open_sources(recipe(dataset=dataset, eval_dataset=eval_dataset, dataset_columns=columns))
        return [fields for _, fields in opened]

    mapped = {"prompt": "question", "completion": "answer"}
    assert fields("train.jsonl", "ours.jsonl") == [mapped, {"prompt": "prompt", "completion": "completion"}]
    assert fields("train.jsonl", "partly.jsonl") == [mapped, {"prompt": "question", "completion": "completion"}]
    with pytest.raises(UserError, match=r"other\.jsonl has no column 'answer'"):  # its text is not what was meant
        fields("train.jsonl", "other.jsonl")
    with pytest.raises(UserError, match=r"ours\.jsonl has no column 'question'"):  # training data must have them
        fields("ours.jsonl", "train.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.jsonl", "no file or folder 'trian.jsonl'; .*\n.*did you mean 'train.jsonl'"),
        ("./nowhere/x", "no file or folder './nowhere/x', nor a folder 'nowhere'"),
        ("train.csv", "'train.csv' ends in '.csv'; expected .jsonl or .parquet"),
        ("folder", "a folder without state.json"),
        ("someone/something", "no file or folder 'someone/something', and .* offline"),
    ],
)
def test_a_name_that_leads_nowhere(name, message, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write(tmp_path / "train.jsonl", *pairs(1))
    write(tmp_path / "train.csv", "a,b")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=message):
        open_all(recipe(dataset=name), tokenizer, VOCAB_SIZE)


def test_an_unreachable_hub_is_told_without_retries(tokenizer, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(UserError, match=r"the hub cannot be reached .*no route.*\n.*HF_HUB_OFFLINE=1"):
        open_all(recipe(dataset="someone/something"), tokenizer, VOCAB_SIZE)


def test_parquet_and_folders_give_the_same_samples_as_lines(tmp_path, tokenizer):
    import datasets

    rows = [chat("Hi", "Hello", system="Be kind"), chat("Hi", "42", "Bye", "Bye now")]
    write(tmp_path / "train.jsonl", *rows)
    table = datasets.Dataset.from_list([{**row, "source": "here"} for row in rows])
    table.to_parquet(tmp_path / "train.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "several")
    opened = [
        open_all(recipe(dataset=name, chat_template="chatml"), tokenizer, VOCAB_SIZE).train
        for name in ("train.jsonl", "train.parquet", "one", "several")
    ]
    for other in opened[1:]:
        assert [ids.tolist() for ids, _ in other] == [ids.tolist() for ids, _ in opened[0]]
    assert opened[1].place(1) == "train.parquet row 2"
    several = recipe(dataset="several", dataset_split="test", chat_template="chatml")
    assert len(open_all(several, tokenizer, VOCAB_SIZE).train) == 1
    with pytest.raises(UserError, match=r"dataset_split: several has no split 'tset'; expected train, test\n.*'test'"):
        open_all(recipe(dataset="several", dataset_split="tset"), tokenizer, VOCAB_SIZE)


def test_a_damaged_page_of_a_parquet_file_is_a_problem_of_that_file(tmp_path, tokenizer):
    import datasets

    datasets.Dataset.from_list(pairs(200)).to_parquet(tmp_path / "train.parquet")
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[60:400] = b"\xff" * 340
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"^error: train.parquet: damaged or unreadable \(.*\)$"):
        open_all(recipe(dataset="train.parquet"), tokenizer, VOCAB_SIZE)


@pytest.mark.parametrize("content", ['{"splits": ["tra', '{"names": []}', "[1]", '{"splits": 1}'])
def test_a_damaged_list_of_splits_is_told(content, tmp_path, tokenizer):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dataset_dict.json").write_text(content)
    with pytest.raises(UserError, match=r"dataset: 'folder' cannot be opened: its dataset_dict.json is damaged"):
        open_all(recipe(dataset="folder"), tokenizer, VOCAB_SIZE)


# Tokenised samples


def test_what_is_too_long_is_cut_and_what_is_left_without_targets_dropped(tmp_path, tokenizer):
    rows = [
        {"prompt": "a b ", "completion": "c"},  # fits
        {"prompt": "a b ", "completion": "c " * 50},  # cut
        {"prompt": "a " * 50, "completion": "c"},  # cut, nothing supervised left
    ]
    write(tmp_path / "train.jsonl", *rows)
    opened = open_all(recipe(max_length=16), tokenizer, VOCAB_SIZE)
    assert "train.jsonl: 2 of 3 samples cut at 16 tokens, 1 dropped: nothing supervised left" in opened.notes
    report = opened.train.report
    assert (report["num_samples"], report["num_truncated"], report["num_dropped_unsupervised"]) == (2, 2, 1)
    assert opened.train.lengths.tolist()[1] == 16
    assert report["num_tokens"] == sum(opened.train.lengths)
    ids, mask = opened.train[1]
    assert opened.train.num_supervised[1] == mask.sum() and mask[-1] == 1 and ids.dtype == np.int32


def test_the_first_token_is_no_target(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"text": "Hello"})
    train = open_all(recipe(), tokenizer, VOCAB_SIZE).train
    assert train.num_supervised[0] == train.lengths[0] - 1


def test_a_sample_of_one_token_teaches_nothing(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"text": tokenizer.eos_token}, {"text": "Hello"})
    train = open_all(recipe(), tokenizer, VOCAB_SIZE).train
    assert (len(train), train.report["num_dropped_unsupervised"], train.place(0)) == (1, 1, "train.jsonl:2")


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"prompt": "a " * 50, "completion": "c"})
    with pytest.raises(UserError, match="none of 1 samples has a supervised token within max_length"):
        open_all(recipe(max_length=16), tokenizer, VOCAB_SIZE)


def test_a_refusing_template_is_told_once_with_a_place(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *[chat("Hi", "Hello")] * 3)
    with pytest.raises(UserError) as caught:
        open_all(recipe(), tokenizer, VOCAB_SIZE)
    assert len(caught.value.problems) == 1
    assert "no chat template of its own (at train.jsonl:1 and 2 more)" in str(caught.value)


def test_ids_beyond_the_model_are_refused(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(2))
    with pytest.raises(UserError, match="but the model has 20 embeddings"):
        open_all(recipe(), tokenizer, 20)


def forbid_tokenising(monkeypatch):
    monkeypatch.setattr(samples, "encode_all", lambda *_: pytest.fail("tokenised again"))


def test_the_second_time_comes_from_the_cache_wherever_the_file_lies(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *pairs(5))
    first = open_all(recipe(), tokenizer, VOCAB_SIZE)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    forbid_tokenising(monkeypatch)
    second = open_all(recipe(dataset="moved.jsonl"), tokenizer, VOCAB_SIZE)
    assert second.fingerprint == first.fingerprint
    assert second.train.place(2) == "moved.jsonl:3"
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first.train, second.train, strict=True))


def test_whatever_changes_the_ids_changes_the_fingerprint(tmp_path, tokenizer, monkeypatch):
    def fingerprint(tokenizer=tokenizer, **changes):
        return open_all(recipe(**changes), tokenizer, VOCAB_SIZE).fingerprint

    write(tmp_path / "train.jsonl", *pairs(5))
    other = byte_level_tokenizer()
    other.eos_token = "<|im_end|>"
    seen = [fingerprint(), fingerprint(max_length=16), fingerprint(chat_template="chatml"), fingerprint(other)]
    seen += [fingerprint(eval_split_size=2), fingerprint(eval_split_size=2, seed=1)]
    monkeypatch.setattr(samples, "CODE_VERSION", -1)
    seen.append(fingerprint())
    write(tmp_path / "train.jsonl", *pairs(6))
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("name", ["input_ids.npy", "mask.npy", "starts.npy", "numbers.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_cache_entry_is_made_again(name, damage, tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *pairs(5))

    def contents():
        train = open_all(recipe(), tokenizer, VOCAB_SIZE).train
        return [(ids.tolist(), mask.tolist(), train.place(i)) for i, (ids, mask) in enumerate(train)]

    before = contents()
    (file,) = cache.glob(f"*/{name}")
    content = bytearray(file.read_bytes())
    content[-5] ^= 64
    file.unlink()
    if damage != "gone":
        file.write_bytes(content if damage == "flipped" else content[:-5])
    assert contents() == before
    assert len(list(cache.glob("*/entry.json"))) == 1


def test_a_cache_that_cannot_be_written_is_told(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *pairs(5))
    (tmp_path / "file").touch()
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written.*\n.*KIT_CACHE"):
        open_all(recipe(), tokenizer, VOCAB_SIZE)


def test_a_cache_without_room_is_told(tmp_path, tokenizer, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path / "train.jsonl", *pairs(5))
    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(UserError, match=r"cache: .* cannot be written \(No space left on device\)"):
        open_all(recipe(), tokenizer, VOCAB_SIZE)


def _open_and_count(barrier, queue, tokenizer):
    calls, encode_all = [], samples.encode_all
    samples.encode_all = lambda *arguments: calls.append(1) or encode_all(*arguments)
    barrier.wait()
    queue.put((len(calls), open_all(recipe(), tokenizer, VOCAB_SIZE).fingerprint, len(calls)))


def test_of_processes_that_start_together_one_tokenises(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(50))
    fork = multiprocessing.get_context("fork")
    barrier, queue = fork.Barrier(3), fork.Queue()
    processes = [fork.Process(target=_open_and_count, args=(barrier, queue, tokenizer)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=15) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(after for _, _, after in results) == [0, 0, 1]
    assert len({fingerprint for _, fingerprint, _ in results}) == 1


# Order

ORDER_OF_SEED_42 = [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


def test_each_epoch_holds_every_sample_once_in_its_own_order():
    settings = recipe(global_batch_size=4, num_train_epochs=3)
    batches = [sample_ids(step, 10, settings) for step in range(total_steps(10, settings))]
    assert [len(batch) for batch in batches] == [4] * 8
    slots = [i for batch in batches for i in batch]
    epochs = [slots[start : start + 10] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_and_never_changes():
    settings = recipe(global_batch_size=10)
    assert sample_ids(0, 10, settings) != sample_ids(0, 10, recipe(global_batch_size=10, seed=1))
    assert sample_ids(0, 10, settings) == ORDER_OF_SEED_42


@pytest.mark.parametrize(
    ("changes", "num_steps"),
    [
        ({"max_steps": 7}, 7),
        ({"num_train_epochs": 1}, 3),
        ({"num_train_epochs": 1.1, "global_batch_size": 11}, 1),  # 11 samples; in binary a little more than 11
        ({"num_train_epochs": 0.05}, 1),
        ({"num_train_epochs": 1, "global_batch_size": 64}, 1),
    ],
)
def test_epochs_are_rounded_up_to_full_steps(changes, num_steps):
    settings = recipe(**{"global_batch_size": 4, **changes})
    assert total_steps(10, settings) == num_steps
    assert len(sample_ids(num_steps - 1, 10, settings)) == settings.global_batch_size


@pytest.mark.parametrize("num_samples", [1, 3, 8, 9])  # with 4 ranks of 2 samples: one, W - 1, W * B, W * B + 1
def test_every_batch_is_full_and_takes_the_samples_in_turn(num_samples, many):
    settings = recipe(global_batch_size=8, num_train_epochs=3)
    train = many(num_samples)
    batches = [sample_ids(step, num_samples, settings) for step in range(total_steps(num_samples, settings))]
    assert len(batches) == -(-3 * num_samples // 8)
    for ids in batches:
        times = [ids.count(i) for i in range(num_samples)]
        assert sum(times) == 8 and max(times) <= -(-8 // num_samples) + 1
        ranks = [micro_batches(train, ids, rank, 4, 2, 0) for rank in range(4)]
        assert [[len(rows_of(batch)) for batch in batches] for batches in ranks] == [[2]] * 4
    slots = [i for ids in batches for i in ids]
    for first in range(0, len(slots) - num_samples, num_samples):
        assert sorted(slots[first : first + num_samples]) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [1, 3, 8, 10])
def test_an_extended_run_continues_where_the_shorter_one_ended(num_samples):
    short, long = (recipe(global_batch_size=4, num_train_epochs=epochs) for epochs in (1, 3))
    whole = [sample_ids(step, num_samples, long) for step in range(total_steps(num_samples, long))]
    end = total_steps(num_samples, short)
    assert [sample_ids(step, num_samples, short) for step in range(end)] + whole[end:] == whole
    slots = [i for ids in whole for i in ids]
    assert all(slots[: 3 * num_samples].count(i) == 3 for i in range(num_samples))


@pytest.mark.parametrize(("num", "told"), [(7, True), (8, False)])
def test_fewer_samples_than_a_global_batch_are_remarked_on(num, told, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(num))
    notes = open_all(recipe(global_batch_size=8), tokenizer, VOCAB_SIZE).notes
    expected = f"{num} samples are fewer than global_batch_size 8: every step sees some of them more than once"
    assert (expected in notes) == told


# Batches


def rows_of(batch):
    """The unpadded rows of a batch that have targets."""
    rows = [
        ids[: int(mask.sum())].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return rows if len(batch["targets"]) else []


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_together_hold_the_global_batch_on_any_topology(num_processes, size, many):
    train = many(40)
    rng = random.Random(0)
    for num in sorted({1, max(1, num_processes - 1), num_processes * size, num_processes * size + 1, 8}):
        ids = rng.sample(range(40), num)
        ranks = [micro_batches(train, ids, rank, num_processes, size, 0) for rank in range(num_processes)]
        assert {len(batches) for batches in ranks} == {-(-num // (num_processes * size))}
        rows = [row for batches in ranks for batch in batches for row in rows_of(batch)]
        assert sorted(rows) == sorted(train[i][0].tolist() for i in ids)
        num_targets = sum(len(batch["targets"]) for batches in ranks for batch in batches)
        assert num_targets == train.num_supervised[ids].sum()
        assert max(batch["input_ids"].shape[0] for batches in ranks for batch in batches) <= size


@pytest.mark.parametrize(("num_processes", "size"), [(1, 4), (2, 3), (3, 2), (8, 4)])
def test_evaluation_takes_each_sample_once_and_all_ranks_equally_many_batches(num_processes, size, many):
    train = many(13)
    ranks = [list(evaluation_batches(train, rank, num_processes, size, 0)) for rank in range(num_processes)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for batch in batches for row in rows_of(batch)]
    assert sorted(rows) == sorted(ids.tolist() for ids, _ in train)


def test_similar_lengths_meet_at_the_same_time(many):
    train = many(32)
    ranks = [micro_batches(train, range(32), rank, 4, 2, 0) for rank in range(4)]
    widths = [[batch["input_ids"].shape[1] for batch in batches] for batches in zip(*ranks, strict=True)]
    assert all(min(now) >= max(later) for now, later in pairwise(widths))


def test_targets_are_the_tokens_after_their_positions(many):
    train = many(6)
    batch = collate(train, [5, 0, 3], pad_token_id=7)
    num_rows, length = batch["input_ids"].shape
    assert (num_rows, length) == (3, max(train.lengths[[5, 0, 3]]))
    expected = []
    for row, i in enumerate([5, 0, 3]):
        ids, mask = train[i]
        assert batch["input_ids"][row].tolist() == ids.tolist() + [7] * (length - len(ids))
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * (length - len(ids))
        expected += [(row * length + t, int(ids[t + 1])) for t in range(len(ids) - 1) if mask[t + 1]]
    pairs = list(zip(batch["target_positions"].tolist(), batch["targets"].tolist(), strict=True))
    assert pairs == expected
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_a_batch_without_samples_has_a_token_to_attend_to_and_no_target(many):
    batch = collate(many(1), [], pad_token_id=7)
    assert batch["input_ids"].tolist() == [[7]] and batch["attention_mask"].tolist() == [[1]]
    assert batch["targets"].shape == batch["target_positions"].shape == (0,)


# Evaluation data


def test_a_held_out_share_is_the_same_each_time_and_apart_from_the_rest(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(20))
    opened = open_all(recipe(eval_split_size=0.25), tokenizer, VOCAB_SIZE)
    assert (len(opened.train), len(opened.evaluation)) == (15, 5)
    held_out = [opened.evaluation.place(i) for i in range(5)]
    assert not set(held_out) & {opened.train.place(i) for i in range(15)}
    again = open_all(recipe(eval_split_size=5, max_eval_samples=3), tokenizer, VOCAB_SIZE)
    assert [again.evaluation.place(i) for i in range(3)] == held_out[:3]
    assert opened.describe()["evaluation"]["num_samples"] == 5


@pytest.mark.parametrize("size", [0.01, 0.99, 20, 21])
def test_a_share_that_leaves_a_side_empty_is_refused(size, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(20))
    with pytest.raises(UserError, match=r"eval_split_size: .* of 20 samples leaves nothing to (train|evaluate) on"):
        open_all(recipe(eval_split_size=size), tokenizer, VOCAB_SIZE)


def test_a_single_sample_cannot_be_split(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(1))
    with pytest.raises(UserError, match="eval_split_size: a single sample cannot be split; expected at least two"):
        open_all(recipe(eval_split_size=1), tokenizer, VOCAB_SIZE)


def test_an_evaluation_set_of_its_own(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(20))
    write(tmp_path / "eval.jsonl", *pairs(4))
    opened = open_all(recipe(eval_dataset="eval.jsonl"), tokenizer, VOCAB_SIZE)
    assert (len(opened.train), len(opened.evaluation)) == (20, 4)
    assert opened.fingerprint == open_all(recipe(), tokenizer, VOCAB_SIZE).fingerprint


def test_prompt_and_reference_part_at_the_last_answer(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello", "Bye", "Bye now"))
    train = open_all(recipe(chat_template="chatml"), tokenizer, VOCAB_SIZE).train
    prompt, reference = prompt_and_reference(train, 0)
    assert tokenizer.decode(prompt).endswith("Bye<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(reference) == "Bye now<|im_end|>"


def test_pad_id_falls_back_to_eos_and_zero():
    tokenizer = byte_level_tokenizer()
    assert data.pad_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert data.pad_id(tokenizer) == 0
    tokenizer.pad_token = "<|im_end|>"
    assert data.pad_id(tokenizer) == tokenizer.pad_token_id != 0
