"""Families of different kinds train as their own code would, or are refused in words: ``benchmarks/families.py``."""

import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

# Refusals by method or packing; every other cell of the family must be ok.
NO_PACKS = {"packing": r"packed samples influence each other .* --packing false"}
KINDS = {
    "gemma3": {},  # vision tower, sliding window
    "mixtral": {},  # fused experts, routers with a loss
    "llama": {},  # dense
    "gemma": {},  # tied
    "gemma2": {},  # soft caps, eager attention only
    "granite": {},  # scaled
    "qwen2_moe": {},  # shared experts
    "deepseek_v3": {},  # persistent buffers, latent attention
    # Chunked attention, routers that are linear, a prefix of no module; a temperature that changes with the place.
    "llama4_text": {"packing": "loss of a sample depends on others"},
    "mllama": {},  # layers that text skips
    "mistral3": {},  # text of a model of images
    "qwen2_5_vl": {},  # positions of images
    "gpt2": {},  # Conv1D, learned positions
    "falcon": {"qlora": "qlora would quantise none of the weights"} | NO_PACKS,  # linear layers of its own
    "mamba": NO_PACKS,  # recurrent
    "jamba": NO_PACKS,  # attention and recurrent layers, experts
    "zamba2": NO_PACKS | {"fsdp2": r"config: .* layers of Zamba2ForCausalLM share weights"},
    "qwen3_5_moe_text": NO_PACKS,  # a leak between packs that losses hardly show
    "laguna": {},  # names that peft converts
    "trocr": NO_PACKS,  # attention to an encoder that is not there
}

OWN_LOGITS = ("falcon", "trocr")  # their forward does more between decoder and logits than the loss head reads


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix(["llama", "mixtral", "falcon", "qwen3_5_moe_text"], always=0, rest=KINDS))
def test_a_family_trains_as_its_own_code_does_or_is_refused_in_words(family, tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks/families.py"), family, "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(rows.read_text())
    about = {"family", "buffers", "without mask", "head", "seconds"}
    cells = {name: text for name, text in row.items() if name not in about}
    assert len(cells) == 7
    assert row["without mask"] == "same"
    if "full" not in KINDS[family]:  # with that method it is proven
        assert row["head"] == ("own logits" if family in OWN_LOGITS else "proven")
    for name, text in cells.items():
        refusal = next((KINDS[family][word] for word in name.split(", ") if word in KINDS[family]), None)
        assert re.search(refusal, text) if refusal else text == "ok", f"{name}: {text}"
