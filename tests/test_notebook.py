"""The notebooks: their commands parse, and their cells run from top to bottom with tiny models."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT

from kit.config.command_line import read_command_line

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
# In place of models and data of the hub, and of many steps.
TINY = {
    "--recipe smollm2-360m-lora --max_length 512": "--recipe tiny --method lora --max_eval_samples 2",
    "--max_steps 40": "--max_steps 2",
    "--max_steps 60": "--max_steps 2",
    "--max_steps 20": "--max_steps 1 --global_batch_size 16 --per_device_train_batch_size 16 --max_eval_samples 2",
    "!kit train --output_dir runs/first": "!kit train --output_dir runs/first --max_steps 2 --max_eval_samples 2",
    "max_new_tokens=200": "max_new_tokens=4",
}
MADE = {
    "grpo": ("runs/grpo/final/adapter_model.safetensors",),
    "images": ("runs/images/final/model.safetensors", "squares/new.png"),
    "sft": ("runs/sft/final/adapter_model.safetensors", "merged/model.safetensors"),
    "t4": ("runs/first/final", "runs/t4/final/adapter_model.safetensors", "merged/model.safetensors"),
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


def cells_of(path):
    cells = json.loads(path.read_text())["cells"]
    return [(cell["cell_type"], "".join(cell["source"]).replace("\\\n", "")) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_commands_have_flags_that_exist(path):
    commands = re.findall(r"^(?:!|    )(kit .*)", "\n".join(text for _, text in cells_of(path)), re.MULTILINE)
    assert len(commands) > 1
    for command in commands:
        name, *words = shlex.split(command)[1:]
        if name in ("train", "inspect"):
            assert not read_command_line([word for word in words if word not in ("-n", "1")]).problems, command


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_from_top_to_bottom(path, tmp_path, monkeypatch):
    code, cells = [PRELUDE], [text for kind, text in cells_of(path) if kind == "code"]
    for cell in cells:
        for real, tiny in TINY.items():
            cell = cell.replace(real, tiny)
        if cell.startswith("!kit "):
            code.append(f"shell({cell[1:]!r})")
        elif cell.startswith("%%writefile "):
            first, _, text = cell.partition("\n")
            code.append(f"pathlib.Path({first.split()[1]!r}).write_text({text!r})")
        elif not cell.startswith(("%pip ", "!nvidia-smi ")):
            code.append(cell)
    code.append("assert shown and all('srcdoc=' in page and '&lt;svg' in page for page in shown)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-c", "\n\n".join(code)]  # a file would run again in each process that forks
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("! kit ") == sum(cell.startswith("!kit ") for cell in cells)
    assert "--max_steps 2" in done.stdout or "--max_steps 1" in done.stdout, "a cell stands otherwise than here"
    for made in MADE[path.stem]:
        assert (tmp_path / made).exists()
