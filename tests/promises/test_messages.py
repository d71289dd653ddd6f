"""Thirty mistakes: exit status 2, one message that says where, what was found and what to do, and nothing written.

What needs no more than wrong words is in ``tests/cli/surface.txt``. Here the data, the model, an adapter, a run or a
machine does not fit.
"""

import fcntl
import gzip
import json
import re
import shutil

import pytest
from helpers import ROOT

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
MUTED = {"role": "assistant", "content": "Hello", "train": False}
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "What?"}
# Each row is JSON, or what is written as it is.
FILES = {
    "chat.jsonl": [GOOD] * 40,
    "other/chat.jsonl": [GOOD],
    "pairs.jsonl": [PAIR],
    "cut.jsonl": [GOOD, b'{"messages": '],
    "unknown.jsonl": [{"a": 1}],
    "mixed.jsonl": [GOOD, {"text": "a"}],
    "role.jsonl": [{"messages": [{"role": "usr", "content": "a"}]}],
    "silent.jsonl": [GOOD, {"messages": GOOD["messages"][:1]}],
    "muted.jsonl": [{"messages": [GOOD["messages"][0], MUTED]}],
    "short.jsonl.gz": [gzip.compress(json.dumps(GOOD).encode() * 999)[:-20]],
    "data.pkl": [b"cos\nsystem\n(S'touch pwned'\ntR."],
    "theirs/run.json": [{}],
    "mine.yaml": [b"distributed_type: NO", b"mixed_precison: no"],
}
TRAIN = "recipes/finetune.py --max_length 256"
OURS = f"{TRAIN} --model_name_or_path model"
TINY = f"{TRAIN} --model_name_or_path {ROOT / 'recipes/tiny/model'} --dataset chat.jsonl"
CHAT = f"{OURS} --dataset chat.jsonl"
RUN = f"{CHAT} --config single --save_steps 2"
STEP = "run/checkpoints/step-00000004"

# What is typed, and parts of the message.
MESSAGES = {
    # rows
    f"{OURS} --dataset cut.jsonl": ["cut.jsonl:2: not JSON at column 13", "remove such rows"],
    f"{OURS} --dataset unknown.jsonl": ["unknown.jsonl: columns a; expected messages,", "--dataset_columns"],
    f"{OURS} --dataset mixed.jsonl": ["mixed.jsonl:2: no 'messages' (it has text)"],
    f"{OURS} --dataset role.jsonl": ["role.jsonl:1 messages[0].role: found 'usr'", "did you mean 'user'?"],
    f"{OURS} --dataset silent.jsonl": ["silent.jsonl:2 messages: no assistant turn"],
    f"{OURS} --dataset muted.jsonl": ["muted.jsonl: nothing in 1 samples is supervised", "kit inspect"],
    f"{OURS} --dataset short.jsonl.gz": ["short.jsonl.gz: damaged or cut short (EOFError"],
    f"{OURS} --dataset pairs.jsonl": ["pairs.jsonl: columns prompt, chosen, rejected", "--objective dpo"],
    # datasets
    f"{OURS} --dataset data.pkl": ["'data.pkl' ends in '.pkl'; expected .jsonl"],
    f"{OURS} --dataset chat.jsonl,other/chat.jsonl": ["two datasets are named 'chat'", "name:"],
    f"{OURS} --dataset nothing-*.jsonl": ["dataset: no file or folder 'nothing-*.jsonl'"],
    f"{OURS} --dataset someone/else": ["dataset: no file or folder 'someone/else', and "],
    f"{CHAT} --chat_template gemma": ["'gemma' needs bos_token, <start_of_turn>", "take another template"],
    f"{CHAT} --streaming": ["--streaming: without max_steps", "--max_steps 1000"],
    # models and adapters
    f"{TRAIN} --dataset chat.jsonl --model_name_or_path run": ["run: no config.json in it", "`kit export run/final"],
    f"{CHAT} --adapter_name_or_path run": ["no adapter_config.json in run", "did you mean run/final?"],
    f"{TRAIN} --dataset chat.jsonl --model_name_or_path {STEP}": [f"{STEP} is a checkpoint", f"kit export {STEP}"],
    f"{CHAT} --new_tokens '<|im_end|>'": ["'<|im_end|>' exists already, with id 2", "--trainable_tokens"],
    f"{CHAT} --trainable_tokens '<|im_ende|>'": ["'<|im_ende|>' is not in the tokenizer", "did you mean '<|im_end|>'?"],
    f"{TINY} --lora_modules_to_save lm_head": ["are tied here, and peft", "embed_tokens"],
    f"{TINY} --adapter_name_or_path run/final": [
        "run/final does not fit this model",
        "its base: --model_name_or_path /",
    ],
    "recipes/export.py orphan --output_dir merged": ["names a base that cannot be opened: /nowhere/base", "BASE"],
    "recipes/score.py --model_name_or_path model --eval_dataset pairs.jsonl --max_length 256 --objective dpo": [
        "objective: dpo needs the reference model",
        "--objective simpo",
    ],
    # runs and their folders
    f"{RUN} --output_dir theirs": ["theirs/run.json is no record of a run", "another --output_dir"],
    f"{RUN} --output_dir run --max_steps 4 --learning_rate 1e-3": [
        "run holds another run (learning_rate: 0.0002 -> 0.001)",
        "another --output_dir",
        "--overwrite_output_dir true, which deletes it",
    ],
    f"{RUN} --output_dir run --max_steps 3": ["max_steps: 3 steps wanted, and 4 are done", "--max_steps 4"],
    f"{RUN} --output_dir damaged --max_steps 8": [
        "damaged/checkpoints/step-00000004: state.json has 1 bytes",
        "damaged/checkpoints/step-00000002: state.json has 1 bytes",
        "no checkpoint of this run is complete",
    ],
    f"{RUN} --output_dir busy --max_steps 4": ["output_dir: busy is in use by", "another --output_dir"],
    f"{RUN} --output_dir new --max_steps 4 --learning_rate 1e-3 --resume_from_checkpoint {STEP}": [
        f"{STEP} is of another run (learning_rate: 0.0002 -> 0.001)",
        "kit export exports it as a model",
    ],
    f"{CHAT} --report_to mlflow": ["--report_to: found 'mlflow'; expected list of tensorboard", "metrics.jsonl has"],
    # strategies
    f"{CHAT} --config mine.yaml": ["mine.yaml:2 mixed_precison: not a key", "did you mean 'mixed_precision'?"],
}


@pytest.fixture
def folder(model_folder, finetune, tmp_path, monkeypatch):
    """Has ``model``, the data, what a run of 4 steps left in ``run``, and copies of it in which something is wrong."""
    monkeypatch.chdir(tmp_path)
    for name, rows in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    (tmp_path / "model").symlink_to(model_folder)
    flags = iter(RUN.split()[1:])
    finetune.defaults = {flag.removeprefix("--"): next(flags) for flag in flags}
    finetune.ok("run", max_steps=4)
    for name in ("damaged", "busy"):
        shutil.copytree("run", name)
    for path in (tmp_path / "damaged/checkpoints").glob("*/state.json"):
        path.write_text("{")
    shutil.copytree("run/final", "orphan")
    adapter = tmp_path / "orphan/adapter_config.json"
    adapter.write_text(json.dumps(json.loads(adapter.read_text()) | {"base_model_name_or_path": "/nowhere/base"}))
    return tmp_path


def content(folder):
    """Size and time of all files but ``error.txt``, in which a run that was there keeps the message."""
    files = [path for path in folder.rglob("*") if path.name != "error.txt" and path.is_file()]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_a_mistake_is_answered_in_words_and_writes_nothing(folder, typed_here):
    assert len(MESSAGES) == 31
    before = content(folder)
    with (folder / "busy/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command, parts in MESSAGES.items():
            status, out, err = typed_here(command)
            assert status == 2, (command, out, err)
            assert [part for part in parts if part not in err] == [], (command, err)
            assert err.count("error: ") == 1 and "Traceback" not in err and re.search(r"^error: ", err, re.M), command
            assert "weights:" not in out, command  # none were loaded
            assert content(folder) == before, command
