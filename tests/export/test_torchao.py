"""A model rounded by torchao opens with plain transformers, and computes what quantisation-aware training does."""

import pytest
from helpers import ROOT, export

from kit.system.errors import UserError

TINY = ROOT / "recipes/tiny/model"


def test_without_torchao_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.model.adapters.qat.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"torchao is not installed"):
        export(TINY, tmp_path / "new", "--format=torchao", "--qat=int4_weight_only")
    assert list(tmp_path.iterdir()) == []
