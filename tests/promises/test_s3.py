"""Data in a bucket are those of a file: read anew at each start, and a change of them is another run."""

import os
import shutil
import socket
import subprocess
import time
from functools import partial

import pytest
from promises.test_kills import everything

FLAGS = {"method": "lora", "lora_dropout": 0.1, "save_steps": 2, "lr_scheduler_type": "constant", "config": "ddp"}


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
    command = [server, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
def test_data_on_s3(finetune, bucket, chat_file):
    bucket.put(str(chat_file), "bucket/data/chats.jsonl")
    expected = everything(finetune.ok("whole", 2, **FLAGS, max_steps=8))
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    flags = FLAGS | {"prepare": partial(set_environment, settings), "dataset": "s3://bucket/data/chats.jsonl"}
    finetune.ok("run", 2, **flags, max_steps=4)
    continued = finetune.ok("run", 2, **flags, max_steps=8)
    assert "continuing after step 4 of 8" in continued.output and everything(continued)[1:] == expected[1:]
    text = "".join(path.read_text() for path in continued.folder.glob("*.json*")) + continued.output
    assert "secret-of-the-test" not in text
    bucket.pipe_file("bucket/data/chats.jsonl", b"\n".join(chat_file.read_bytes().splitlines()[:40]))
    changed = finetune("run", 2, **flags, max_steps=9)
    assert changed.status == 2 and "holds another run" in changed.output
