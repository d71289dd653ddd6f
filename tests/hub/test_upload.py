"""``--push_to_hub`` refuses at the start what the hub would at the end; a push that fails does not fail the run."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_hub import Repository, served
from helpers import ROOT
from huggingface_hub import constants

from kit.failures.signals import StopRequest
from kit.hub.upload import check_upload, push_at_end
from kit.system import interrupt
from kit.system.errors import UserError

BASE = "some/base"


@pytest.fixture
def hub(monkeypatch, model_folder, tmp_path):
    """The stand-in with a base to train, and a login as ``me``."""
    with served() as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUB_OFFLINE": "0",
            "HUB_DISABLE_XET": "1",
            "TOKEN": "write",
        }.items():
            monkeypatch.setenv(f"HF_{name}", value)
        files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
        hub.repositories["model", BASE] = Repository(False, files)
        yield hub


def refusal(name="me/mine", base=BASE, is_adapter=True):
    with pytest.raises(UserError) as caught:
        check_upload(name, base, is_adapter)
    return str(caught.value)


def test_a_name_that_cannot_be_written_is_refused(hub):
    hub.repositories["dataset", "me/data"] = Repository(True)
    hub.repositories["model", "me/full"] = Repository(True, {"config.json": b"{}"})
    hub.repositories["model", "me/mine"] = Repository(False)
    for name, says in [
        ("a/..", "push_to_hub: 'a/..' is not a hub id"),
        ("nobody/x", "push_to_hub: nobody: has no such member (me); expected an owner for whom you may write: me/x"),
        ("club/x", "push_to_hub: club: lets you only read (me)"),
        ("me/full", "push_to_hub: me/full holds a full model, and this is an adapter"),
        ("me/mine", "me/mine is public: everyone would see the model"),
    ]:
        assert says in refusal(name)


def test_a_token_without_the_rights_is_refused(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for token, says in (
        ("", "the hub: no token .*HF_TOKEN"),
        ("wrong", "it refuses your token for me/mine .*`hf auth login`"),
        ("read", "the token of me may only read; expected a token with write access"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        assert re.search(says, refusal(), re.DOTALL), refusal()


def test_a_hub_out_of_reach_is_said(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be reached (HF_HUB_OFFLINE is set)" in refusal()


def test_a_base_in_a_folder_is_said_with_what_else_is_wrong(hub, model_folder):
    said = refusal("nobody/x", str(model_folder))
    assert f"the model card must name the base, and {model_folder} is a folder" in said
    assert "`kit push RUN --base_model ID`" in said and "nobody: has no such member" in said


def test_a_value_that_is_no_name_is_refused_without_the_hub(recipe):
    for name in ("mine", "a b/c", "a/b/c"):
        with pytest.raises(ValueError, match="push_to_hub"):
            recipe(push_to_hub=name)


def test_a_push_that_cannot_start_is_said_and_not_raised(monkeypatch, tmp_path, capsys, handlers):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    push_at_end(tmp_path / "my run", "me/mine", wait=lambda: None)
    said = "".join(capsys.readouterr())
    assert (
        "warning: the model is not uploaded (" in said and f"`kit push '{tmp_path}/my run' me/mine` uploads it" in said
    )


@pytest.fixture
def handlers():
    """None in the test, also where the tests were started with nohup; afterwards as they were."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interrupt.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_the_upload_and_its_child(monkeypatch, tmp_path, capfd, handlers):
    number = signal.SIGTERM
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.partial; mv {tmp_path}/pid.partial {tmp_path}/pid; exec sleep 60"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    StopRequest(SimpleNamespace(num_processes=1, is_main_process=True))  # as a run has it

    def wait():
        if (tmp_path / "pid").exists():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # as from the terminal and from the launcher

    push_at_end(tmp_path / "run", "me/mine", wait)
    said = "".join(capfd.readouterr())
    assert f"warning: the model is not uploaded (stopped by {number.name}); it is complete here" in said
    assert "stopping and saving" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- real runs


@pytest.fixture
def run(hub, chat_file, tmp_path):
    """Types a short run that is to be uploaded, with more words: its folder, and what it printed."""

    def run(*words):
        flags = {"model_name_or_path": BASE, "dataset": chat_file, "output_dir": tmp_path / "run", "max_length": 256}
        flags |= {"global_batch_size": 8, "max_steps": 1, "push_to_hub": "lab/mine", "method": "full"}
        words = [str(ROOT / "recipes/finetune.py"), *(f"--{key}={value}" for key, value in flags.items()), *words]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return flags["output_dir"], done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_run_whose_upload_failed_has_succeeded_and_uploads_when_it_is_started_again(hub, run):
    """The main process uploads, and the other rank leaves."""
    hub.fails_at = {0: 400}
    folder, said = run("--config=ddp", "--num_processes=2")
    final = folder / "final"
    by_hand = f"kit push {folder} lab/mine"
    assert "warning: the model is not uploaded (status 2)" in said and f"`{by_hand}` uploads it" in said
    found = hub.repositories["model", "lab/mine"]
    assert found.is_private and found.files == {}
    assert [each for each in hub.requests if "whoami" in each] == ["GET api/whoami-v2"] * 2  # one rank, and kit push
    _, again = run("--config=single")
    assert "this run is finished" in again and "not uploaded" not in again.replace("not uploaded (not part", "")
    assert set(found.files) == {path.name for path in final.iterdir()} and len(found.commits) == 1
    assert found.files["model.safetensors"] == (final / "model.safetensors").read_bytes()
    assert b"vllm serve lab/mine" in found.files["README.md"]
