"""Untrusted model folders: what would block, fill the memory or never terminate is refused by name."""

import json
import os
import shutil

import pytest

from kit.config.recipe import Recipe
from kit.model.build import build_meta_model, open_config
from kit.model.pretrained import files
from kit.model.pretrained.locate import locate_model, open_adapter
from kit.system.errors import UserError


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def change(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_numbers_that_build_without_end_are_refused(folder):
    whole = json.loads((folder / "config.json").read_text())
    for changes in ({"num_hidden_layers": 1e30}, {"n_layer": -5}, {"vision_config": {"depth": 10**9}}):
        (folder / "config.json").write_text(json.dumps(whole | changes))
        with pytest.raises(UserError, match=r"config.json \w+: found .*; expected 0 to 1\d+$"):
            locate_model(str(folder), None)
    change(folder, n_layer=0, vision_config={}, num_hidden_layers=61, task_specific_params={"num_layers": -1})
    assert locate_model(str(folder), None) == str(folder)


def test_a_model_of_too_many_modules_is_not_built_to_its_end(folder, monkeypatch):
    monkeypatch.setattr("kit.model.build.MAX_MODULES", 30)
    settings = Recipe(model_name_or_path=str(folder), dataset="none")
    with pytest.raises(UserError, match="more than 30 modules"):
        build_meta_model(settings, open_config(settings))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_regular_file_is_refused(name, is_link, folder):
    (folder / name).unlink()
    if is_link:
        (folder / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(folder / name)
    with pytest.raises(UserError, match=r"not a regular file|no config.json in it"):
        locate_model(str(folder), None)


def test_a_pipe_in_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"no adapter_model.safetensors|not a regular file"):
        open_adapter(str(tmp_path))


def test_a_file_that_is_too_large_is_refused(folder, monkeypatch):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(files.SMALL_BYTES + 1)
    with pytest.raises(UserError, match=r"config.json has 64 MiB; expected at most 64 MiB"):
        locate_model(str(folder), None)


def test_an_index_names_files_in_its_folder_only(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    for name in ("../other/model.safetensors", "/etc/passwd"):
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="expected files in its folder"):
            locate_model(str(folder), None)
