"""A model or an adapter is found by its name, and what cannot be opened is refused by that name."""

import shutil

import pytest
from model_helpers import TEMPLATE, problems

from kit.model.build import open_config
from kit.model.pretrained.locate import HUB_SECONDS, locate_model
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.errors import UserError

DAMAGED = ["", "[]", "[" * 200_000, '{"metadata": {}, "weight_map": null}', '{"metadata": {}, "weight_map": {}}']
DAMAGED += ['{"metadata": {}, "weight_map": {"lm_head.weight": 3}}', '{"weight_map": {"lm_head.weight": "part"}}']


def test_a_missing_folder_is_named(recipe, tmp_path):
    with pytest.raises(UserError, match=r"model_name_or_path: .*/nowhere: no such folder"):
        open_config(recipe(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no config\.json in it"):
        open_config(recipe(tmp_path))


def test_a_damaged_index_is_refused_by_name_before_anything_is_loaded(recipe, changed):
    folder = changed()
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    assert problems(recipe(folder)) == ""  # beside undivided weights nobody opens it
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    for text in DAMAGED:
        index.write_text(text)
        with pytest.raises(UserError, match=r"model_name_or_path: .*index\.json"):
            open_config(recipe(folder))


def test_an_adapter_folder_must_hold_an_adapter(recipe, tmp_path):
    text = problems(recipe(adapter_name_or_path=str(tmp_path)))
    assert "adapter_config.json" in text and "adapter_model.safetensors" in text


def test_an_adapter_from_the_hub_brings_its_tokenizer_too(recipe, with_template, model_folder, tmp_path, monkeypatch):
    on_hub = {path.name: path.read_bytes() for path in with_template.iterdir()}
    snapshot = tmp_path / "hub"

    def snapshot_download(name, allow_patterns, **_):
        shutil.rmtree(snapshot, ignore_errors=True)
        snapshot.mkdir()
        for file in on_hub.keys() & set(allow_patterns):
            (snapshot / file).write_bytes(on_hub[file])
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    mine = recipe(adapter_name_or_path="some/adapter")
    assert open_tokenizer(mine).chat_template == TEMPLATE
    for file in [file for file in on_hub if not file.startswith("adapter")]:
        del on_hub[file]
    assert open_tokenizer(mine).chat_template == (model_folder / "chat_template.jinja").read_text()
    assert problems(mine) == ""
    del on_hub["adapter_config.json"]
    assert problems(mine).startswith("adapter_name_or_path: no adapter_config.json in some/adapter")


def test_a_hub_that_cannot_be_reached_costs_one_short_request(monkeypatch):
    asked = []

    def model_info(self, name, revision=None, timeout=None):
        asked.append((name, revision, timeout))
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(UserError, match=r"no folder 'some/model', and the hub cannot be reached \(no route\)"):
        locate_model("some/model", "v2")
    assert asked == [("some/model", "v2", HUB_SECONDS)] and HUB_SECONDS <= 10


def test_offline_a_model_missing_from_the_cache_is_reported_once(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--models").mkdir()
    reported = []
    for look in (open_config, open_tokenizer):
        with pytest.raises(UserError, match=r"HF_HUB_OFFLINE forbids .*\n    -> did you mean 'some/models'") as caught:
            look(recipe("some/model"))
        reported += caught.value.problems
    assert len(set(reported)) == 1
