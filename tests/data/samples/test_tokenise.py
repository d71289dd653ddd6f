"""Samples are made once, by as many processes as there are, and kept; what is wrong with the rows is reported."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    VOCAB_SIZE,
    byte_level_tokenizer,
    chat,
    open_all,
    open_recipe_data,
    open_recipe_datasets,
    pairs,
    preference_pairs,
    rated_answers,
    recipe,
    write,
)
from helpers import ROOT, matrix

from kit import cache as kit_cache
from kit.data.samples import rows as encoder
from kit.data.samples import tokenise
from kit.errors import UserError


def contents(train):
    return [(train.origin(i), ids.tolist(), weights.tolist()) for i, (ids, weights) in enumerate(train)]


# Several processes


def many(num):
    return [chat(f"Question {i}? " * (1 + i % 5), f"Answer {i}. " * (1 + i % 7)) for i in range(num)]


@pytest.mark.slow
def test_several_processes_make_the_same_entry_as_one(tmp_path, tokenizer, cache):
    rows = many(6000)
    rows[10] = ""
    write(tmp_path / "train.jsonl", *rows)
    files = []
    for num_processes in (1, 3):
        train = open_all(tokenizer, chat_template="chatml", dataset_num_proc=num_processes).train
        (folder,) = cache.glob("*/")
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert len(train) == 5999 and train.origin(10) == "train.jsonl:12"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert files[0] == files[1]


@pytest.mark.slow
def test_what_one_of_several_processes_finds_wrong_is_reported_with_its_line(tmp_path, tokenizer, cache):
    rows = many(6000)
    rows[5000] = "{"
    rows[5500]["messages"][0]["role"] = "usr"
    write(tmp_path / "train.jsonl", *rows)
    with pytest.raises(UserError, match=r"train.jsonl:5001: not JSON(.|\n)*train.jsonl:5501 messages\[0\].role"):
        open_all(tokenizer, chat_template="chatml", dataset_num_proc=2)
    assert not list(cache.glob("*/entry.json")) and not [p for p in cache.iterdir() if p.is_dir()]


@pytest.mark.parametrize("num_rows", [20, 6000])  # one block; several, one for each process
def test_a_text_to_replace_that_is_in_no_row_is_refused(num_rows, tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *many(num_rows - 1), chat("Who are you?", "{{NAME}}"))
    entry = {"path": "train.jsonl", "replace": {"{{NAME}}": "Rob", "{{NAM}}": "Rob", "Rob": "Al", "{{NAME": "x"}}
    settings = {"chat_template": "chatml", "dataset_num_proc": 2}
    with pytest.raises(UserError) as caught:  # one after the other: no "{{NAME" is left, and "Rob" stands there now
        open_all(tokenizer, dataset=[entry], **settings)
    (problem,) = caught.value.problems
    assert (problem.where, problem.found) == ("train.jsonl", "replace: no row has '{{NAM}}', '{{NAME'")
    assert not list(cache.glob("*/entry.json"))
    entry["replace"] = {"{{NAME}}": "Rob", "Rob": "Al"}
    assert len(open_all(tokenizer, dataset=[entry], **settings).train) == num_rows


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_start_with_a_reason(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *many(6000))
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


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("samples", lambda array: array[["start", "length"]]),
        ("samples", lambda array: np.concatenate([array, shifted(array[-1:], 1)])),
        ("samples", lambda array: shifted(array, -1)),
        ("input_ids", lambda array: array.astype(np.int64)),
        ("input_ids", lambda array: array[:-1]),
        ("weight_codes", lambda array: array[:-1]),
    ],
)
def test_an_entry_whose_arrays_do_not_fit_each_other_is_made_again(name, change, tmp_path, tokenizer, cache):
    """Also one whose hashes are right."""
    write(tmp_path / "train.jsonl", *pairs(5))
    first = open_all(tokenizer)
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    arrays, info = kit_cache.open_entry(folder)
    arrays = {key: np.array(array) for key, array in arrays.items()}
    writer = kit_cache.Writer(folder)
    writer.append({**arrays, name: np.ascontiguousarray(change(arrays[name]))})
    writer.finish(info)
    again = open_all(tokenizer)
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first.train, again.train, strict=True))


def with_values(array, name, value):
    array = array.copy()
    array[name] = value
    return array


PREFERENCES = {"dpo": preference_pairs(5), "kto": rated_answers(5)}


@pytest.mark.parametrize("objective", PREFERENCES)
@pytest.mark.parametrize(
    "change",
    [
        None,  # the array is gone
        lambda array: array[:-1],
        lambda array: array[["prompt_length", "first_length"]],
        lambda array: with_values(array, "first_length", 0),
        lambda array: with_values(array, "first_length", 1000),
        lambda array: with_values(array, "prompt_length", array["first_length"]),
        lambda array: with_values(array, "prompt_length", 0),
    ],
)
def test_an_entry_whose_halves_do_not_fit_is_made_again(change, objective, tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *PREFERENCES[objective])
    first = open_all(tokenizer, objective=objective).train
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    arrays, info = kit_cache.open_entry(folder)
    arrays = {key: np.array(array) for key, array in arrays.items()}
    records = arrays.pop("preferences")
    writer = kit_cache.Writer(folder)
    writer.append(arrays if change is None else {**arrays, "preferences": np.ascontiguousarray(change(records))})
    writer.finish(info)
    again = open_all(tokenizer, objective=objective).train
    assert contents(again) == contents(first) and (again.preferences == first.preferences).all()


@pytest.mark.parametrize("objective", PREFERENCES)
@pytest.mark.parametrize("damage", ["flipped", "gone", ""])
def test_preferences_come_from_the_cache_the_second_time_unless_they_are_damaged(
    damage, objective, tmp_path, tokenizer, cache, monkeypatch
):
    write(tmp_path / "train.jsonl", *PREFERENCES[objective])
    first = open_all(tokenizer, objective=objective).train
    (file,) = cache.glob("*/preferences.bin")
    content = bytearray(file.read_bytes())
    content[5] ^= 64
    if damage == "flipped":
        time.sleep(0.02)  # longer than the clock of a file system ticks
        file.write_bytes(content)
    elif damage == "gone":
        file.unlink()
    else:
        forbid_tokenising(monkeypatch)
    again = open_all(tokenizer, objective=objective).train
    assert contents(again) == contents(first) and (again.preferences == first.preferences).all()
    assert again.fingerprint == first.fingerprint


def test_the_same_rows_have_an_entry_for_each_kind_that_they_are_read_as(tmp_path, tokenizer, cache):
    rows = [{**row, "completion": row["chosen"], "label": True} for row in preference_pairs(5)]
    write(tmp_path / "train.jsonl", *rows)
    seen = {open_all(tokenizer, objective=objective).fingerprint for objective in ("sft", "dpo", "kto")}
    assert len(seen) == 3 and len(list(cache.glob("*/entry.json"))) == 3
    # Objectives that want the same share it.
    assert open_all(tokenizer, objective="orpo").fingerprint in seen
    assert open_all(tokenizer, objective="dft").fingerprint in seen


@pytest.mark.slow
def test_several_processes_make_the_same_pairs_as_one(tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *preference_pairs(40_000))
    alone = open_all(tokenizer, objective="dpo", dataset_num_proc=1).train
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    shutil.rmtree(folder)
    together = open_all(tokenizer, objective="dpo", dataset_num_proc=3).train
    assert (alone.preferences == together.preferences).all() and len(together) == 40_000
    assert (alone.hashes("ids_hash") == together.hashes("ids_hash")).all()


def shifted(samples, by):
    samples = samples.copy()
    samples["start"] += by
    return samples


@pytest.mark.parametrize("name", ["samples.bin", "input_ids.bin", "weight_codes.bin", "entry.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("remembered", [True, False])
def test_a_damaged_cache_entry_is_made_again(name, damage, remembered, tmp_path, tokenizer, cache, monkeypatch):
    monkeypatch.setattr(kit_cache, "YOUNG_SECONDS", -1.0 if remembered else 60.0)
    write(tmp_path / "train.jsonl", *pairs(5))
    before = contents(open_all(tokenizer).train)
    assert contents(open_all(tokenizer).train) == before
    (file,) = cache.glob(f"*/{name}")
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[-5] ^= 64
    if damage == "gone":
        file.unlink()
    else:
        time.sleep(0.02)  # longer than the clock of a file system ticks
        file.write_bytes(content if damage == "flipped" else content[:-5])
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a careless copy would
    assert contents(open_all(tokenizer).train) == before
    assert len(list(cache.glob("*/entry.json"))) == 1


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


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *pairs(5))
    (tmp_path / "file").touch()
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written.*\n.*KIT_CACHE"):
        open_all(tokenizer)


def test_a_cache_without_room_is_reported_and_left_clean(tmp_path, tokenizer, monkeypatch, cache):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path / "train.jsonl", *pairs(5))
    monkeypatch.setattr(kit_cache.Writer, "append", fail)
    with pytest.raises(UserError, match=r"cache: .* cannot be written \(No space left on device\)"):
        open_all(tokenizer)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def _open_and_count(barrier, queue, tokenizer):
    calls, encode_all = [], encoder.encode_all
    encoder.encode_all = lambda *arguments: calls.append(1) or encode_all(*arguments)
    barrier.wait()
    settings = recipe()
    queue.put((open_recipe_data(settings, tokenizer, VOCAB_SIZE).fingerprint, len(calls)))


@pytest.mark.slow
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
    assert sorted(num_calls for _, num_calls in results) == [0, 0, 1]
    assert len({fingerprint for fingerprint, _ in results}) == 1


OVERSIZE = """
import resource, sys
sys.path[:0] = [{tests!r}, {root!r}]
from data_helpers import byte_level_tokenizer, open_all
import kit.data.feed.batches, torch
tokenizer = byte_level_tokenizer()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = int(status["VmData"].split()[0]) * 1024 + {room}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
train = open_all(tokenizer, dataset_num_proc={processes}, max_length=100_000).train
print(sum(int(weights.sum()) for _, weights in train))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts all private memory on Linux only")
@pytest.mark.parametrize("processes", matrix([1, 2], always=0))
def test_a_data_set_four_times_larger_than_the_memory_it_may_use(processes, tmp_path):
    room = 24 << 20
    line = json.dumps({"text": "Hello there, how are you? 42 " * 300}) + "\n"
    with (tmp_path / "train.jsonl").open("w") as file:
        for _ in range(4 * room // len(line)):
            file.write(line)
    tests = str(ROOT / "tests")
    code = OVERSIZE.format(tests=tests, root=os.path.dirname(tests), room=room, processes=processes)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 1e7


@pytest.mark.slow
def test_interrupted_tokenising_leaves_no_entry(tmp_path, tokenizer, monkeypatch, cache):
    write(tmp_path / "train.jsonl", *many(3000))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenise._Entry, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_all(tokenizer, chat_template="chatml", dataset_num_proc=2)
    assert not [path for path in cache.iterdir() if path.is_dir()]


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {root!r}]
from data_helpers import byte_level_tokenizer, open_all
from kit.data.samples import tokenise
add, added = tokenise._Entry.add, []

def die_after_two(self, piece):
    added.append(add(self, piece))
    if len(added) == 2:
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "die":
    tokenise._Entry.add = die_after_two
print(len(open_all(byte_level_tokenizer(), chat_template="chatml", dataset_num_proc=2).train))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is of Linux")
def test_a_start_that_is_killed_leaves_no_worker_and_the_next_one_works(tmp_path, cache):
    write(tmp_path / "train.jsonl", *many(12_000))
    tests = str(ROOT / "tests")
    code = KILLED.format(tests=tests, root=os.path.dirname(tests))

    def start(how):
        return subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60)

    # The helpers hold the pipe of standard output: run returns when they have gone too.
    assert "dying" in start("die").stdout and [path for path in cache.iterdir() if path.is_dir()]
    assert start("live").stdout.strip() == "12000"
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user one must be root")
def test_another_user_opens_what_was_prepared_in_a_cache_it_cannot_write(tokenizer, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        monkeypatch.setenv("KIT_CACHE", f"{folder}/cache")
        os.mkdir(f"{folder}/cache", 0o755)  # to share it: the kit makes one for its user alone
        monkeypatch.chdir(folder)
        write(Path(folder) / "train.jsonl", *pairs(5))
        open_all(tokenizer)
        process = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(tokenizer,))
        process.start()
        process.join(30)
        assert process.exitcode == 0


def _as_nobody(tokenizer):
    os.setuid(65534)
    encoder.encode_all = lambda *_: pytest.fail("tokenised again")
    assert len(open_all(tokenizer).train) == 5


# What is reported of the rows


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"prompt": "a " * 50, "completion": "c"})
    with pytest.raises(UserError, match="none of 1 samples has a supervised token within max_length"):
        open_all(tokenizer, max_length=16)


def test_a_chat_set_with_everything_masked_is_an_error(tmp_path, tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    messages[1]["train"] = False
    write(tmp_path / "train.jsonl", {"messages": messages})
    with pytest.raises(UserError, match=r"train.jsonl: nothing in 1 samples is supervised"):
        open_all(tokenizer, chat_template="chatml")


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
    reported = (
        "warning: train.jsonl: 3 of 40 rows (7.5%) cannot be used and are skipped, first train.jsonl:18 prompt: a num"
    )
    assert any(note.startswith(reported) for note in opened.notes)
    assert opened.describe()["sources"][0]["num_skipped"] == 3
    listed = opened.skipped_rows()
    assert [row["row"] for row in listed] == ["train.jsonl:18", "train.jsonl:21", "train.jsonl:31"]
    assert len(listed[0]["problems"]) == 2 and listed[2]["problems"][0].startswith("not JSON at column 11")
    (file,) = cache.glob("*/skipped_rows.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == listed


def test_skipped_rows_in_the_cache_stop_a_run_that_does_not_skip(tmp_path, tokenizer):
    with_bad_rows(tmp_path)
    with pytest.raises(UserError) as before:
        open_all(tokenizer)
    open_all(tokenizer, on_bad_row="skip")
    with pytest.raises(UserError) as after:
        open_all(tokenizer)
    assert str(after.value) == str(before.value) and "error: 4 problems" in str(after.value)
    assert str(after.value).endswith("or leave them out with --on_bad_row skip")


def test_to_skip_changes_nothing_where_no_row_is_bad(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "train.jsonl", *pairs(5))
    strict = open_all(tokenizer)
    forbid_tokenising(monkeypatch)
    assert open_all(tokenizer, on_bad_row="skip").fingerprint == strict.fingerprint


def test_a_conversation_that_the_template_refuses_is_skipped_too(tmp_path, tokenizer):
    refused = {"messages": [*chat("Hi")["messages"], {"role": "tool", "content": "x"}, *chat("a", "b")["messages"]]}
    write(tmp_path / "train.jsonl", *many(20), refused)
    opened = open_all(tokenizer, chat_template="zephyr", on_bad_row="skip")
    assert len(opened.train) == 20 and [row["row"] for row in opened.skipped_rows()] == ["train.jsonl:21"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"}, x]', "train.json:1: not JSON"),
        ('[{"text": "a"}', "train.json:1: the file ends inside a JSON array"),
        ('text\na\nb\n"c\n', "train.csv:4: not a row of cells (unexpected end of data)"),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_is_never_taken_for_a_shorter_one(content, message, tmp_path, tokenizer):
    name = message.split(":")[0]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        open_all(tokenizer, dataset=name, on_bad_row="skip")
    assert message in str(caught.value)


def test_too_many_bad_rows_are_not_skipped(tmp_path, tokenizer, cache):
    write(tmp_path / "train.jsonl", *pairs(8), {}, {})
    with pytest.raises(UserError, match=r"train.jsonl: 2 of 10 rows \(20.0%\) cannot be used; expected at most 10%"):
        open_all(tokenizer, on_bad_row="skip")
    assert not list(cache.glob("*/entry.json"))


def test_what_is_ignored_is_not_taken_from_an_entry_where_it_was_not(tmp_path, tokenizer):
    rows = [pair | {"label": i != 3} for i, pair in enumerate(pairs(20))]
    write(tmp_path / "train.jsonl", *rows)
    ignoring = open_all(tokenizer, dataset_columns={"label": "ignore"})
    with pytest.raises(UserError, match=r"an answer marked as bad would be learned \(at train.jsonl:4\)"):
        open_all(tokenizer)
    skipping = open_all(tokenizer, on_bad_row="skip")
    assert (len(ignoring.train), len(skipping.train)) == (20, 19)
    assert len(open_all(tokenizer, on_bad_row="skip", dataset_columns={"label": "ignore"}).train) == 20
    assert ignoring.fingerprint != skipping.fingerprint


def test_ignoring_what_changes_no_sample_is_the_same_data(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *(pair | {"label": True} for pair in pairs(5)))
    assert open_all(tokenizer, dataset_columns={"label": "ignore"}).fingerprint == open_all(tokenizer).fingerprint


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "max_steps": 1}])
def test_the_reason_why_the_only_row_is_skipped_is_reported(streaming, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", {"text": ""})
    with pytest.raises(UserError, match=r"train.jsonl:1 text: empty(.|\n)* fix or remove such rows$"):
        open_all(tokenizer, on_bad_row="skip", **streaming)
