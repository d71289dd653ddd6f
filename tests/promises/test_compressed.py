"""llmcompressor's own output opens with transformers, and agrees with the model that was trained.

Needs the package compressed-tensors, and ``LLMCOMPRESSOR``, the folder of a virtual environment with llmcompressor.
"""

import os
import re
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, export
from transformers import AutoModelForCausalLM

from kit.export.compressed import SCHEMES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.release,
    pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"),
    pytest.mark.skipif("LLMCOMPRESSOR" not in os.environ, reason="LLMCOMPRESSOR is not set"),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_is_opened_by_transformers_and_agrees(finetune, fp32, tmp_path, capsys, scheme):
    tiny = ROOT / "recipes/tiny"
    flags = {"model_name_or_path": tiny / "model", "dataset": tiny / "train.jsonl", "max_steps": 40, "max_length": 128}
    run = finetune.ok("run", config=fp32["single"], **flags)
    group = ["--group_size=64"] if scheme.startswith("W4") else []
    export(run.folder, tmp_path / "new", "--format=compressed-tensors", f"--scheme={scheme}", *group)
    said = capsys.readouterr().out
    assert float(re.search(r"top-1 agreement (.*)%", said)[1]) > 90
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert opened.config.quantization_config.quant_method == "compressed-tensors"
    assert opened(torch.tensor([[1, 5, 9]])).logits.isfinite().all()
