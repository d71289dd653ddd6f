"""A model rounded by torchao opens with plain transformers, and computes what quantisation-aware training does."""

from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, export, matrix
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from kit.config.settings.method import MethodSettings
from kit.errors import UserError
from kit.model.qat import SCHEMES, install_qat

TINY = ROOT / "recipes/tiny/model"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra qat is not installed")


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize("scheme", matrix(SCHEMES, always=1))
def test_rounded_weights_open_with_plain_transformers_and_compute_what_qat_trains(tmp_path, scheme, capsys):
    export(TINY, tmp_path / "new", "--format=torchao", f"--qat={scheme}", "--dtype=bfloat16")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    settings = MethodSettings(model_name_or_path=str(TINY), method="full", qat=scheme)
    trained = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    install_qat(trained, settings)
    ids = torch.arange(60).view(3, 20)
    assert torch.equal(opened(input_ids=ids).logits, trained.eval()(input_ids=ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    assert not torch.equal(opened(input_ids=ids).logits, plain(input_ids=ids).logits)
    said = capsys.readouterr().out
    assert f"{scheme} in 28 layers: " in said and "before rounding" in said
    card = ModelCard((tmp_path / "new/README.md").read_text())
    assert card.data.tags == ["torchao"] and "pip install torchao" in card.text


def test_without_torchao_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.model.qat.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"torchao is not installed"):
        export(TINY, tmp_path / "new", "--format=torchao", "--qat=int4_weight_only")
    assert list(tmp_path.iterdir()) == []
