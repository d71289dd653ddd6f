"""``kit push`` uploads the model and nothing else, once, and says before it begins what will not work."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import Repository, served
from helpers import ROOT, actual_strategy
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file

from kit.cli.main import main
from kit.config.recipe import Recipe
from kit.export.card import gguf_card, model_card, serving_section
from kit.strategy.strategies import SINGLE
from kit.train.loop_state import LoopState

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, and a login as ``me``."""
    with served() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "write")
        hub.repositories["model", "some/base"] = Repository(False)
        hub.cards["some/base"] = {"license": "apache-2.0"}
        yield hub


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a run with what an upload looks at: its record, and ``final/`` of two shards or of an adapter."""
    monkeypatch.chdir(tmp_path)

    def make(name="run", base="some/base", adapter=None):
        final = tmp_path / name / "final"
        final.mkdir(parents=True)
        recipe = Recipe(
            model_name_or_path=base, dataset="d.jsonl", max_length=8, method="full" if adapter is None else "lora"
        )
        last = LoopState(step=3, last_evaluation={"eval_loss": 1.5}, evaluated_step=3)
        strategy = actual_strategy(type=SINGLE, num_processes=1)
        served = serving_section("vllm serve path/to/this/folder") if adapter is None else ""
        (final / "README.md").write_text(model_card(recipe, strategy, last, has_chat_template=True) + served)
        (final / "tokenizer_config.json").write_text("{}")
        (final / "error.txt").write_text("/home/somebody")
        (final / "optimizer.safetensors").write_text("x")
        (final.parent / "run.json").write_text('{"recipe": "/home/somebody"}')
        (final.parent / "metrics.jsonl").write_text('{"step": 3}\n')
        if adapter is not None:
            config = {"base_model_name_or_path": base, "r": 16, **adapter}
            (final / "adapter_config.json").write_text(json.dumps(config))
            save_file({"a": torch.ones(3)}, final / "adapter_model.safetensors")
            return final.parent
        (final / "config.json").write_text("{}")
        for i, shard in enumerate(SHARDS):
            save_file({f"w{i}": torch.full((4, 4), float(i))}, final / shard)
        weight_map = {f"w{i}": shard for i, shard in enumerate(SHARDS)}
        (final / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return final.parent

    return make


def push(capsys, *words):
    """The status of ``kit push``, and what it printed."""
    status = main(["push", *words])
    out, err = capsys.readouterr()
    return status, out + err


MODEL = {"README.md", "config.json", "model.safetensors.index.json", "tokenizer_config.json", *SHARDS}


def test_a_run_is_uploaded_in_one_private_commit_and_only_its_model(hub, make, capsys):
    make("my run")
    status, text = push(capsys, "my run")
    assert status == 0, text
    found = hub.repositories["model", "me/my-run"]
    assert found.is_private and set(found.files) == MODEL and len(found.commits) == 1
    assert found.files[SHARDS[0]] == Path("my run/final", SHARDS[0]).read_bytes()
    assert "not uploaded, as it is no part of the model: error.txt, optimizer.safetensors" in text
    assert b"somebody" not in b"".join(found.files.values())


def test_the_card_is_complete_and_its_code_names_the_repository(hub, make, capsys):
    before = (make() / "final/README.md").read_text()
    assert push(capsys, "run", "lab/mine")[0] == 0
    card = hub.repositories["model", "lab/mine"].files["README.md"].decode()
    about = ModelCard(card).data
    assert (about.base_model, about.license) == ("some/base", "apache-2.0")
    assert (
        "\n- licence of the base: `apache-2.0`\n" in card
        and "\n- data: `d`\n" in card
        and "| eval_loss | 1.5 |" in card
    )
    assert 'folder = "lab/mine"' in card and "path/to" not in card and "\nvllm serve lab/mine\n" in card
    assert Path("run/final/README.md").read_text() == before


def test_gguf_files_are_uploaded_with_their_card_and_modelfile(hub, make, capsys):
    final = make() / "final"
    folder = Path("gguf")
    folder.mkdir()
    (folder / "run-Q8_0.gguf").write_bytes(b"GGUFx")
    (folder / "Modelfile").write_text("FROM ./run-Q8_0.gguf\n")
    card = gguf_card((final / "README.md").read_text(), ["run-Q8_0.gguf"], [], True)
    (folder / "README.md").write_text(card)
    assert push(capsys, "gguf", "lab/mine")[0] == 0
    found = hub.repositories["model", "lab/mine"].files
    assert set(found) == {"README.md", "Modelfile", "run-Q8_0.gguf"}
    assert "llama-server --jinja -hf lab/mine:Q8_0\n" in found["README.md"].decode()
    (folder / "run-Q8_0.gguf").write_bytes(b"")
    assert "half a model: run-Q8_0.gguf is no GGUF file" in push(capsys, "gguf", "lab/mine")[1]


def test_the_same_command_again_uploads_nothing(hub, make, capsys):
    make()
    push(capsys, "run")
    status, text = push(capsys, "run")
    found = hub.repositories["model", "me/run"]
    assert status == 0 and "nothing to upload" in text
    assert len(found.commits) == 1 and len(hub.uploads) == 2


def test_after_a_failure_in_the_middle_only_what_is_missing_is_sent(hub, make, capsys):
    make()
    hub.fails_at = {1: 400}
    status, text = push(capsys, "run")
    assert status == 2 and "`kit push run` again uploads only what is missing" in text and "Traceback" not in text
    assert hub.repositories["model", "me/run"].files == {}  # never half a model
    assert push(capsys, "run")[0] == 0
    assert set(hub.repositories["model", "me/run"].files) == MODEL
    assert len(hub.uploads) == 3 and len(hub.objects) == 2  # of two files one was sent twice


@pytest.mark.slow
def test_a_killed_upload_goes_on(hub, make):
    make()
    hub.holds_at = 1
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "kit.cli.main", "push", "run"]
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            assert hub.is_held.wait(60)
        finally:
            process.send_signal(signal.SIGKILL)
    assert hub.repositories["model", "me/run"].files == {}
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 0
    found = hub.repositories["model", "me/run"]
    assert set(found.files) == MODEL and len(found.commits) == 1 and len(hub.objects) == 2


def test_another_model_of_fewer_shards_leaves_no_old_weights(hub, make, capsys):
    make()
    push(capsys, "run")
    final = Path("run/final")
    for name in (*SHARDS, "model.safetensors.index.json"):
        (final / name).unlink()
    save_file({"w0": torch.zeros(2)}, final / "model.safetensors")
    hub.repositories["model", "me/run"].files["notes.safetensors"] = b"mine"
    assert push(capsys, "run")[0] == 0
    assert {name for name in hub.repositories["model", "me/run"].files if "safetensors" in name} == {
        "model.safetensors",
        "notes.safetensors",
    }


def test_with_run_adds_its_record(hub, make, capsys):
    make()
    assert push(capsys, "run", "--with_run")[0] == 0
    assert set(hub.repositories["model", "me/run"].files) == MODEL | {"run/run.json", "run/metrics.jsonl"}


def test_an_adapter_names_its_base_by_id(hub, make, capsys):
    make(base="./a-folder", adapter={"r": 40})
    status, text = push(capsys, "run")
    assert status == 2 and "the base: a local folder" in text and hub.requests == []
    fix = re.search(r"-> kit (push run --base_model )ID", text)
    status, text = push(capsys, *fix[1].split()[1:], "some/base")
    assert status == 0, text
    files = hub.repositories["model", "me/run"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "some/base"
    card = files["README.md"].decode()
    assert "\n- base: `some/base`\n" in card and "a-folder" not in card and "is the folder that has it" not in card
    assert "vllm serve some/base --enable-lora --lora-modules run=me/run --max-lora-rank 64" in card


@pytest.mark.parametrize("config", [{"use_dora": True}, {"peft_type": "OFT"}])
def test_an_adapter_that_servers_refuse_gets_no_command_to_serve_it(hub, make, capsys, config):
    make(adapter=config)
    assert push(capsys, "run")[0] == 0
    assert "vllm serve" not in hub.repositories["model", "me/run"].files["README.md"].decode()


def test_a_model_whose_base_is_nowhere_says_so(hub, make, capsys):
    make(base="./a-folder")
    status, text = push(capsys, "run")
    assert status == 2 and "or --base_model none" in text
    assert push(capsys, "run", "--base_model", "none")[0] == 0
    assert (
        ModelCard(hub.repositories["model", "me/run"].files["README.md"].decode()).data.to_dict().get("base_model")
        is None
    )


def test_dry_run_checks_and_changes_nothing(hub, make, capsys):
    make()
    status, text = push(capsys, "run", "--dry_run")
    assert status == 0 and all(name in text for name in MODEL) and f"a new repository: {hub.endpoint}/me/run" in text
    assert ("model", "me/run") not in hub.repositories and not any(each.startswith("PUT") for each in hub.requests)
    assert push(capsys, "run", "nobody/x", "--dry_run")[0] == 2


def test_without_a_network_the_plan_is_printed(hub, make, capsys, monkeypatch):
    make()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    status, text = push(capsys, "run", "--dry_run")
    assert status == 0 and SHARDS[1] in text and "not checked" in text
    status, text = push(capsys, "run")
    assert status == 2 and SHARDS[1] in text and "cannot be reached (HF_HUB_OFFLINE is set)" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in push(capsys, "run")[1]


@pytest.mark.parametrize(
    ("token", "words", "says", "then"),
    [
        ("", [], "no token for", None),
        ("wrong", [], "refuses your token", None),
        ("read", [], "the token of me may only read", None),
        ("write", ["nobody/x"], "nobody: has no such member (me)", "push run me/x"),
        ("write", ["club/x"], "club: lets you only read (me)", "push run me/x"),
        ("write", ["a b"], "'a b' is no hub id", None),
        ("write", ["me/data"], "me/data is a dataset", "push run me/data-model"),
        ("write", ["me/adapter"], "holds an adapter, and this is a full model", "push run me/adapter-full"),
        ("write", ["me/open"], "me/open is public", "push run me/open --public"),
        ("write", ["me/closed", "--public"], "me/closed is private, and stays so", "push run me/closed"),
        ("write", ["--base_model", "some/bsae"], "shows you no model some/bsae", None),
        ("write", ["--base_model", "./base"], "'./base' is no hub id", None),
    ],
)
def test_what_the_hub_would_refuse_is_said_before_anything_is_uploaded(
    hub, make, capsys, monkeypatch, token, words, says, then
):
    make()
    hub.repositories["dataset", "me/data"] = Repository(True)
    hub.repositories["model", "me/adapter"] = Repository(True, {"adapter_config.json": b"{}"})
    hub.repositories["model", "me/open"] = Repository(False)
    hub.repositories["model", "me/closed"] = Repository(True)
    known = dict(hub.repositories)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token or None)
    status, text = push(capsys, "run", *words)
    assert status == 2 and says in text and "Traceback" not in text
    assert hub.uploads == [] and hub.repositories == known
    if then:
        assert f"-> kit {then}\n" in text
        assert push(capsys, *then.split()[1:])[0] == 0


def cut(final):
    path = final / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-4])


def damage(final):
    (final / SHARDS[1]).write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda final: (final / SHARDS[0]).unlink(), f"half a model: no {SHARDS[0]}"),
        (cut, f"half a model: {SHARDS[1]} has"),
        (damage, f"half a model: {SHARDS[1]} is damaged"),
        (lambda final: (final / "tokenizer_config.json").unlink(), "half a model: no tokenizer_config.json"),
        (lambda final: (final / "README.md").unlink(), "no README.md, the model card"),
        (lambda final: (final / "config.json").unlink(), "holds no model"),
        (
            lambda final: (final / "config.json").write_text('{"a": "hf_' + "a" * 34 + '"}'),
            "config.json:1: a credential",
        ),
        (lambda final: final.rename(final.with_name(".final.partial")), "has no final/ yet"),
    ],
)
def test_half_a_model_or_a_credential_is_refused_before_the_hub_is_asked(hub, make, capsys, change, says):
    run = make()
    checkpoint = run / "checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    change(run / "final")
    status, text = push(capsys, "run")
    assert status == 2 and says in text and hub.requests == [] and "a" * 34 not in text
    if "half a model" in says or "no final" in says:
        assert "-> `kit export run/checkpoints/step-00000003 --output_dir model`, then `kit push model" in text
    assert "is a checkpoint" in push(capsys, str(checkpoint))[1]
