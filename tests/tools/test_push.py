"""``kit push`` uploads the model and nothing else, once, and says before it begins what will not work."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_hub import Repository, _commit_of, served
from helpers import actual_strategy
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file

from kit.cli.main import main
from kit.config.recipe import Recipe
from kit.export.card import converted_card, model_card, serving_section
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
        strategy = actual_strategy(type="single", num_processes=1)
        served = serving_section("vllm serve path/to/this/folder") if adapter is None else ""
        (final / "README.md").write_text(
            model_card(recipe, strategy, last, SimpleNamespace(chat_template="x")) + served
        )
        (final / "tokenizer_config.json").write_text("{}")
        (final / "error.txt").write_text("/home/somebody")
        (final / "optimizer.safetensors").write_text("x")
        (final.parent / "run.json").write_text('{"recipe": "/home/somebody"}')
        (final.parent / "metrics.jsonl").write_text('{"step": 3}\n')
        if adapter is not None:
            config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 16, **adapter}
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


def test_a_run_is_uploaded_in_one_private_commit_once_and_only_its_model_with_a_complete_card(hub, make, capsys):
    before = (make("my run") / "final/README.md").read_text()
    status, text = push(capsys, "my run")
    assert status == 0 and all(name in text for name in MODEL), text
    found = hub.repositories["model", "me/my-run"]
    assert found.is_private and set(found.files) == MODEL
    assert found.files[SHARDS[0]] == Path("my run/final", SHARDS[0]).read_bytes()
    assert "not uploaded (not part of the model): error.txt, optimizer.safetensors" in text
    assert b"somebody" not in b"".join(found.files.values())
    card = found.files["README.md"].decode()
    about = ModelCard(card).data
    assert (about.base_model, about.license) == ("some/base", "apache-2.0")
    for line in ("- licence of the base: `apache-2.0`", "- data: `d`", "| `eval_loss` | 1.5 |", "vllm serve me/my-run"):
        assert f"\n{line}\n" in card
    assert 'folder = "me/my-run"' in card and "path/to" not in card
    assert Path("my run/final/README.md").read_text() == before
    status, text = push(capsys, "my run")
    assert status == 0 and f"commit {_commit_of(found)}" in text and len(found.commits) == 1 and len(hub.uploads) == 2


def test_gguf_files_are_uploaded_with_their_card(hub, make, capsys):
    final = make() / "final"
    folder = Path("gguf")
    folder.mkdir()
    (folder / "run-Q8_0.gguf").write_bytes(b"GGUFx")
    card = converted_card((final / "README.md").read_text(), "gguf", "Made:", [], "\n```bash\n```\n")
    (folder / "README.md").write_text(card)
    assert push(capsys, "gguf", "lab/mine")[0] == 0
    found = hub.repositories["model", "lab/mine"].files
    assert set(found) == {"README.md", "run-Q8_0.gguf"}


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


def test_an_adapter_names_its_base_by_id(hub, make, capsys):
    make(base="./a-folder", adapter={"r": 40})
    status, text = push(capsys, "run")
    assert status == 2 and "the base: a local folder" in text and "-> --base_model ID" in text and hub.requests == []
    status, text = push(capsys, "run", "--base_model", "some/base")
    assert status == 0, text
    files = hub.repositories["model", "me/run"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "some/base"
    card = files["README.md"].decode()
    assert "\n- base: `some/base`\n" in card


def test_what_the_hub_would_refuse_is_said_before_anything_is_uploaded(hub, make, capsys):
    """Names and tokens: tests/hub/test_upload.py."""
    make()
    hub.repositories["model", "me/open"] = Repository(False)
    hub.repositories["model", "me/closed"] = Repository(True)
    known = dict(hub.repositories)
    for words, says in [
        (["me/closed", "--public"], "me/closed is private, and stays so"),
        (["--base_model", "some/bsae"], "shows you no model some/bsae"),
    ]:
        status, text = push(capsys, "run", *words)
        assert status == 2 and says in text and "Traceback" not in text
    assert hub.uploads == [] and hub.repositories == known
    assert push(capsys, "run", "me/open", "--public")[0] == 0


def test_half_a_model_or_a_credential_is_refused_before_the_hub_is_asked(hub, make, capsys):
    for number, (change, says) in enumerate([
        (lambda final: (final / SHARDS[0]).unlink(), f"an incomplete model: no {SHARDS[0]}"),
        (lambda final: (final / "config.json").unlink(), "holds no model"),
        (lambda final: (final / "config.json").write_text('{"a": "hf_' + "a" * 34 + '"}'), "json:1: a credential"),
        (lambda final: final.rename(final.with_name(".final.partial")), "has no final/ yet"),
    ]):  # fmt: skip
        change(make(f"run{number}") / "final")
        status, text = push(capsys, f"run{number}")
        assert status == 2 and says in text and hub.requests == [] and "a" * 34 not in text
    (Path("run0/manifest.json")).write_text("{}")
    Path("run0/run.json").unlink()
    assert "is a checkpoint" in push(capsys, "run0")[1]
