"""``recipes/sample.py``: which answers become rows, that training reads them, and that a kill changes no byte."""

import json
import os
import runpy
import signal
from functools import partial

import pytest
from fake_vllm import CHAT, TINY, FakeVllm
from helpers import ROOT, run_ranks

from kit.data.chat.formats import to_sample
from kit.data.kinds.answers import AnswerRows
from kit.data.kinds.columns import choose_fields
from kit.data.kinds.preference import PreferenceRows
from kit.system.errors import UserError

SCRIPT = runpy.run_path(str(ROOT / "recipes/sample.py"))
FLAGS = ["--rewards=exact_match,token_f1", "--max_new_tokens=48", "--max_length=128", "--dataset_num_proc=1"]


def die(number, rank):
    """In a rank, before the script: SIGKILL after the rows of batch ``number`` were written, but before the record."""
    from kit.system import durable

    real, calls = durable.write_text, []

    def write_text(path, text):
        calls.append(path.name)
        if path.name.endswith(".manifest.json") and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, text)

    durable.write_text = write_text


@pytest.fixture
def sampled(tmp_path, fp32):
    """Sample answers to the first 16 prompts of the tiny model: the status, the output, and the path of the rows."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((TINY / "train.jsonl").read_text().splitlines(keepends=True)[:16]))

    def sample(name, *words, model=TINY / "sft", processes=1, config="single", **how):
        log, out = tmp_path / "sampled.log", tmp_path / f"{name}.jsonl"
        words = [str(model), str(prompts), f"--out={out}", f"--config={fp32[config]}", *FLAGS, *words]
        run_ranks("sample", words, processes, log, **how)
        return int(log.with_suffix(".status").read_text()), log.read_text(), out

    return sample


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_of(path):
    return json.loads(path.with_suffix(".manifest.json").read_text())


@pytest.mark.slow
def test_rows_pass_the_condition_are_trained_on_and_have_the_same_bytes_after_a_kill(sampled, finetune):
    ways = ["-n", "4", "--keep", "exact_match>=1", "--per_device_eval_batch_size=4"]  # 4 prompts at a time
    status, output, whole = sampled("whole", *ways)
    assert status == 0, output
    rows, record = rows_of(whole), record_of(whole)
    assert 0 < len(rows) < 64 and {row["rewards"]["exact_match"] for row in rows} == {1.0}
    assert {row["rewards"]["reward"] for row in rows} == {2.0}
    given = {f"prompts.jsonl:{number}": row for number, row in enumerate(rows_of(whole.with_name("prompts.jsonl")), 1)}
    for row in rows:
        messages = given[row["origin"].rpartition("/")[2]]["messages"]
        assert [*row["prompt"], *row["completion"]] == messages, row
    assert (record["num_prompts"], record["num_answers"], record["num_rows"]) == (16, 64, len(rows))
    assert record["settings"]["seed"] == 42 and record["settings"]["is_repeatable"]

    killed = sampled("killed", *ways, prepare=partial(die, 3))
    assert killed[0] == -signal.SIGKILL and record_of(killed[2])["num_prompts"] == 8
    with killed[2].open("a") as file:
        file.write('{"half a row')
    status, output, again = sampled("killed", *ways)
    assert status == 0 and "16 prompts, 8 done" in output, output
    assert again.read_bytes() == whole.read_bytes() and record_of(again) == record | {
        "settings": record["settings"] | {"out": str(again)}
    }
    status, output, _ = sampled("killed", *ways, "--seed=1")
    assert status == 2 and "is of another command (seed: 42 -> 1)" in output
    assert again.read_bytes() == whole.read_bytes()

    flags = {"model_name_or_path": TINY / "model", "adapter_name_or_path": TINY / "sft", "method": "lora"}
    run = finetune.ok("trained", **flags, dataset=whole, max_steps=2, max_length=128, rewards=None, learning_rate=1e-3)
    assert run.info["data"]["train"]["num_samples"] == len(rows) and run.rows[0]["loss"] < 0.5


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_write_the_same_file(sampled):
    ways = ["-n", "3", "--pairs", "--per_device_eval_batch_size=8"]
    files = [sampled(config, *ways, config=config, processes=count) for config, count in (("single", 1), ("ddp", 2))]
    assert [status for status, *_ in files] == [0, 0], files
    assert files[0][2].read_bytes() == files[1][2].read_bytes()


@pytest.mark.slow
def test_pairs_of_a_server_that_fails_once_are_in_the_order_of_the_prompts(sampled):
    server = FakeVllm(TINY / "model", loses_at=5, away_seconds=1)
    try:
        ways = [f"--server={server.url}", "--pairs", "-n=2", "--max_new_tokens=8"]
        status, output, out = sampled("served", *ways, "--server_model=other")
        assert status == 2 and "--server_model: " in output and "has no model 'other'; expected base" in output
        status, output, out = sampled("served", *ways, "--server_model=base")
        assert status == 0 and "asking again" in output, output
    finally:
        server.close()
    asked = [body for path, body in server.requests if path == CHAT]
    assert len(asked) > 32 and {body["model"] for body in asked} == {"base"}
    assert {body["seed"] for body in asked} == {42, 43}
    rows, record = rows_of(out), record_of(out)
    numbers = [int(row["origin"].rpartition(":")[2]) for row in rows]
    assert numbers == sorted(set(numbers)) and record["num_answers"] == 32 and record["num_rows"] == len(rows)
    assert all(row["rewards"][0]["reward"] > row["rewards"][1]["reward"] for row in rows)
    assert not record["settings"]["is_repeatable"]


def test_the_selection_of_a_prompt():
    names = ["number", "overlong", "reward"]
    answers = [
        ({"number": number, "overlong": overlong, "reward": number + overlong}, {"content": text})
        for text, number, overlong in (("a", 1.0, -0.5), ("b", 1.0, 0.0), ("c", 0.0, 0.0), ("d", 0.0, -1.0))
    ]

    def texts(*keep, pairs=False):
        conditions = SCRIPT["read_conditions"](list(keep), names)
        rows = SCRIPT["selected"](answers, conditions, "best" in keep, pairs)
        return [
            [message["content"] for part in ("chosen", "rejected", "completion") for message in row.get(part, ())]
            for row in rows
        ]

    assert texts() == [["b"], ["a"], ["c"], ["d"]]
    assert texts("number>=1") == texts("number>0") == texts("reward>=0.5") == [["b"], ["a"]]
    assert texts("number>=1", "overlong==0") == texts("best") == [["b"]]
    assert texts("overlong==-0.5") == [["a"]]
    assert texts(pairs=True) == [["b", "d"]] and texts("overlong==-0.5", pairs=True) == [["a", "d"]]
    assert texts("overlong==-1", pairs=True) == [] == texts("reward>1", pairs=True)


@pytest.mark.parametrize("prompt", ["2 + 2 =", [{"role": "user", "content": "2 + 2?"}]])
def test_rows_are_read_as_rows_for_sft_and_dpo(prompt):
    answers = [({"reward": float(text == "4")}, {"role": "assistant", "content": text}) for text in "345"]
    for pairs, kind in ((False, AnswerRows), (True, PreferenceRows)):
        for row in SCRIPT["selected"](answers, [], False, pairs):
            row = SCRIPT["as_row"]({"prompt": prompt}, row)
            fields = choose_fields(row, {}, "new.jsonl", kind=kind)
            sample = to_sample(row, fields, kind.format_of(fields))
            assert isinstance(sample, dict) and sample["prompt"] == prompt, sample


def test_a_file_that_another_process_writes_or_that_has_no_sound_manifest_is_left_alone(tmp_path):
    path, manifest = tmp_path / "new.jsonl", tmp_path / "new.manifest.json"
    with SCRIPT["lock"](path), pytest.raises(UserError, match="another process writes"):
        SCRIPT["lock"](path)
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(UserError, match="no link"):
        SCRIPT["lock"](tmp_path / "link.jsonl")
    assert SCRIPT["begin"](path, manifest, {"n": 8})["num_prompts"] == 0  # it is empty
    path.write_text("mine")
    for content in (None, "[]", "{", '{"a": 1}', '{"settings": 3, "num_bytes": 0}'):
        if content:
            manifest.write_text(content)
        with pytest.raises(UserError, match="missing or damaged"):
            SCRIPT["begin"](path, manifest, {"n": 8})
    assert path.read_text() == "mine"
