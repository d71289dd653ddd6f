"""Patterns in an adapter's config: those that would be matched without end are refused, all others are left to peft."""

import json

import pytest

from kit.model.adapters import patterns
from kit.model.adapters.adapter import check_adapter
from kit.model.build import build_meta_model, open_config


def test_layers_are_not_copied_without_end(tmp_path):
    (problem,) = patterns.check_patterns({"layer_replication": [[0, 3]] * 9999}, tmp_path / "adapter_config.json", [])
    assert "layer_replication" in problem.where


@pytest.mark.slow
def test_a_saved_adapter_is_checked_before_peft_opens_it(recipe, adapter, monkeypatch):
    monkeypatch.setattr("kit.config.expressions.CPU_SECONDS", 1)
    path = adapter() / "adapter_config.json"
    saved = json.loads(path.read_text())
    settings = recipe(adapter_name_or_path=str(path.parent))
    meta_model = build_meta_model(settings, open_config(settings))
    assert not check_adapter(settings, meta_model)
    endless = [f"([{letters}_.0-9]+)+!" for letters in ("a-z", "a-y", "a-x")]
    places = {"target_modules": endless[0], "modules_to_save": ["lm_head", endless[1]], "rank_pattern": {endless[2]: 4}}
    path.write_text(json.dumps(saved | places))
    (problem,) = check_adapter(settings, meta_model)
    assert "takes more than" in problem.found and all(each in problem.found for each in endless)
    path.write_text(json.dumps(saved | {"r": 10**12}))  # far more memory than there is
    assert "does not fit this model" in check_adapter(settings, meta_model)[0].found
