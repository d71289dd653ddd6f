"""A run whose disk is lost continues from its copy, and becomes the run it would have been, whenever it was killed."""

import os
import shutil
import signal
import socket
import subprocess
import time
from functools import partial

import pytest
from helpers import matrix
from promises.test_kills import die_at, everything

from kit.checkpoint.manifest import list_checkpoints, verify

FLAGS = {"method": "lora", "lora_dropout": 0.1, "save_steps": 2, "save_total_limit": 2, "max_steps": 8}


def complete(copy):
    """The complete checkpoints of a copy on a disk, each of which must be whole."""
    found = list_checkpoints(copy / "checkpoints")
    for path in found:
        assert verify(path) == []
    return [path.name for path in found]


@pytest.mark.slow
def test_a_run_continues_from_its_copy_on_an_empty_disk(finetune):
    copy = finetune.folder / "a copy"
    flags = FLAGS | {"mirror_to": copy}
    expected = everything(finetune.ok("whole", **FLAGS))
    log = finetune.folder / "points"
    # Only when all checkpoints are copied, the copy of final/ begins: how fast the copying thread is does not matter.
    killed = finetune("run", prepare=partial(die_at, str(copy / "final"), 1, log), **flags)
    assert killed.status == -signal.SIGKILL, killed.output
    newest = complete(copy)[-1]
    shutil.rmtree(finetune.folder / "run")
    shown = finetune("run", dry_run="true", **flags)
    assert f"would continue from {newest} of the copy at {copy}" in shown.output
    assert not (finetune.folder / "run").exists()
    continued = finetune.ok("run", **flags)
    assert f"continuing after step {int(newest[5:])} of 8" in continued.output
    assert everything(continued) == expected
    assert complete(copy) == ["step-00000006", "step-00000008"]
    shutil.rmtree(finetune.folder / "run")
    again = finetune.ok("run", **flags)  # from the last checkpoint, which final/ is written of
    assert everything(again)[1:] == expected[1:]
    assert "this run is finished" in finetune.ok("run", **flags).output
    other = finetune("other", **flags, seed=7)
    assert other.status == 2
    assert "holds another run (seed: 42 -> 7)" in other.output


def set_environment(values, rank):
    """In the child, whose environment is that of the first test."""
    os.environ.update(values)


@pytest.fixture
def bucket(monkeypatch):
    """An S3 server on this machine, with an empty bucket."""
    s3fs = pytest.importorskip("s3fs")
    server = shutil.which("moto_server") or pytest.skip("needs moto[server]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
    keys |= {"AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen([server, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        store = s3fs.S3FileSystem(skip_instance_cache=True)
        for _ in range(100):
            try:
                store.mkdir("bucket")
                break
            except Exception:
                time.sleep(0.3)
        yield store
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("processes", matrix([1, 2], always=2))
def test_data_and_copy_on_s3(finetune, bucket, chat_file, processes):
    bucket.put(str(chat_file), "bucket/data/chats.jsonl")
    flags = FLAGS | {"config": "single" if processes == 1 else "ddp"}
    flags["lr_scheduler_type"] = "constant"
    expected = everything(finetune.ok("whole", processes, **flags))
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    flags |= {"prepare": partial(set_environment, settings)}
    flags |= {"dataset": "s3://bucket/data/chats.jsonl", "mirror_to": "s3://bucket/runs/my run"}
    finetune.ok("first", processes, **flags | {"max_steps": 4})
    continued = finetune.ok("second", processes, **flags)
    assert "continuing after step 4 of 8" in continued.output
    assert everything(continued)[1:] == expected[1:]
    text = "".join(path.read_text() for path in continued.folder.glob("*.json*")) + continued.output
    assert "secret-of-the-test" not in text
    bucket.put(str(chat_file), "bucket/data/chats.jsonl")
    bucket.pipe_file("bucket/data/chats.jsonl", b"\n".join(chat_file.read_bytes().splitlines()[:40]))
    changed = finetune("second", processes, **flags)
    assert changed.status == 2
    assert "holds another run" in changed.output
    for wrong, message in [("s3://nowhere/run", "nothing at 's3://nowhere/run', or no such bucket")]:
        refused = finetune("third", processes, **flags | {"mirror_to": wrong})
        assert refused.status == 2
        assert message in refused.output
