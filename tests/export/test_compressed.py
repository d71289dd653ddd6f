"""Quantised weights are llmcompressor's own; what it was not tried with is refused, and nothing half made is left.

A stand-in copies the model. With llmcompressor itself: tests/promises/test_compressed.py.
"""

import json
import runpy
import shutil
from types import SimpleNamespace

import pytest
from helpers import ROOT, export, fake_llmcompressor
from model_helpers import on_meta

from kit.system.errors import TrainingError, UserError

TINY = ROOT / "recipes/tiny/model"
SCHEME = "--format=compressed-tensors", "--scheme=W4A16"


def test_what_is_missing_or_fails_leaves_no_folder(tmp_path, monkeypatch):
    home = fake_llmcompressor(tmp_path, monkeypatch)
    (home / "mode").write_text("ValueError: out of luck")
    output = tmp_path / "out/new"
    for flags, says in [
        (("--scheme=NVFP4",), "--scheme: NVFP4 measures activations on training rows"),
        ((), "--scheme: groups of 128 weights, and model.layers.0.mlp.down_proj has rows of 320"),
        (("--group_size=64",), "llmcompressor failed: ValueError: out of luck; nothing was written"),
        (("--llmcompressor=nowhere",), "compressed-tensors is not installed, or llmcompressor not in .*nowhere"),
    ]:
        with pytest.raises((UserError, TrainingError), match=says):
            export(TINY, output, *SCHEME, *flags)
        assert not list(output.parent.glob("*"))


@pytest.mark.parametrize("changed", ["", "experts", "images", "code"])
def test_what_llmcompressor_was_not_tried_with_is_refused(changed):
    is_untested = runpy.run_path(str(ROOT / "recipes/export.py"))["_is_untested"]
    model = on_meta("mixtral" if changed == "experts" else "llama")
    config = SimpleNamespace(get_text_config=lambda: None) if changed == "images" else model.config
    settings = SimpleNamespace(trust_remote_code=changed == "code")
    assert is_untested(SimpleNamespace(meta_model=model, config=config, settings=settings)) == bool(changed)


def test_of_a_model_without_a_known_run_weights_are_rounded_without_rows(tmp_path, monkeypatch, capsys):
    home = fake_llmcompressor(tmp_path, monkeypatch)
    export(TINY, tmp_path / "new", *SCHEME, "--group_size=64")
    asked = json.loads((home / "asked.json").read_text())
    assert (asked["scheme"], asked["group_size"], asked["rows"], asked["ignore"]) == ("W4A16", 64, [], ["lm_head"])
    card = (tmp_path / "new/README.md").read_text()
    assert "- compressed-tensors" in card and "top-1 agreement 100.00%" in card and not (tmp_path / "new/work").exists()
    assert f"to serve it: vllm serve {tmp_path}/new" in capsys.readouterr().out


def test_a_model_that_is_quantised_already_is_refused(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match="its weights are quantised"):
        export(tmp_path / "model", tmp_path / "new", *SCHEME)
