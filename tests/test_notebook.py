"""The notebook for a T4: its commands parse, and its cells run from top to bottom with the tiny model."""

import json
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT

from kit.config.command_line import read_command_line

NOTEBOOK = json.loads((ROOT / "docs/notebooks/t4.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
COMMANDS = [cell[1:] for cell in CELLS if cell.startswith("!kit ")]
# In place of the model and the data of the hub, and of their lengths.
TINY = {
    "--recipe smollm2-360m-lora --max_length 512": "--recipe tiny --method lora --max_eval_samples 2",
    "--max_steps 40": "--max_steps 2",
    "!kit train --output_dir runs/first": "!kit train --output_dir runs/first --max_steps 2 --max_eval_samples 2",
    "max_new_tokens=200": "max_new_tokens=4",
}
# What a notebook has and Python has not.
PRELUDE = """
import pathlib, sys, types
from helpers import typed
shown = []
display = types.ModuleType("IPython.display")
display.HTML, display.display = str, shown.append
sys.modules |= {"IPython": types.ModuleType("IPython"), "IPython.display": display}

def shell(line):
    print("!", line, flush=True)
    words = line.split()
    assert words.pop(0) == "kit"
    done = typed("-m", "kit.cli.main", *words, cwd=pathlib.Path.cwd())
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0
"""


def test_its_commands_have_flags_that_exist():
    for command in COMMANDS:
        name, *words = shlex.split(command)[1:]
        if name in ("train", "inspect"):
            assert not read_command_line([word for word in words if word not in ("-n", "1")]).problems


@pytest.mark.slow
@pytest.mark.long
def test_its_cells_run_from_top_to_bottom(tmp_path, monkeypatch):
    code = [PRELUDE]
    for cell in CELLS:
        for real, tiny in TINY.items():
            cell = cell.replace(real, tiny)
        if cell.startswith("!kit "):
            code.append(f"shell({cell[1:]!r})")
        elif not cell.startswith(("%pip ", "!nvidia-smi ")):
            code.append(cell)
    code.append("assert len(shown) == 2 and all('srcdoc=' in page and '&lt;svg' in page for page in shown)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-c", "\n\n".join(code)]  # a file would run again in each process that forks
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("! kit ") == len(COMMANDS)
    assert all(real not in part for part in code for real in list(TINY)[:2]), "a cell stands otherwise than here"
    for made in ("runs/first/final", "runs/t4/final/adapter_model.safetensors", "merged/model.safetensors"):
        assert (tmp_path / made).exists()
