"""Write a model with quantised weights as compressed-tensors, the format that vLLM serves: by llmcompressor.

Promises:

- llmcompressor needs an older transformers than the kit, so it runs in an environment and a process of its own.
- What cannot be quantised is refused before weights are read. ``qat.layers`` says what is: neither the output head nor
  embeddings.
- Integer weights are calibrated on training rows (GPTQ: Frantar et al. 2022, https://arxiv.org/abs/2210.17323). Without
  rows, and after ``qat``, which trains for it, they are rounded to nearest.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kit.config.settings.method import MethodSettings
from kit.model.adapters.qat import scheme_of
from kit.system.console import begin_work
from kit.system.errors import TrainingError, UserError

# By llmcompressor's names: how many weights share a scale by default; None: those of a row.
SCHEMES = {"W4A16": 128, "W4A8": 128, "W8A16": None, "W8A8": None, "FP8_DYNAMIC": None, "NVFP4": 16}
_WORKER = Path(__file__).with_name("llmcompressor_worker.py")
_PROGRESS = re.compile(r"\((\d+/\d+)\): Calibrating")  # which of llmcompressor's parts of the model


def find_llmcompressor(folder: str | None) -> Path:
    """Return the Python of the environment that has llmcompressor.

    Args:
        folder: of the environment, as typed; None: ``LLMCOMPRESSOR``, or ``llmcompressor`` here.

    Raises:
        UserError: something is missing, with what to type.
    """
    home = Path(folder or os.environ.get("LLMCOMPRESSOR") or "llmcompressor").expanduser().absolute()
    if find_spec("compressed_tensors") and any(home.glob("lib/python*/site-packages/llmcompressor")):
        return home / "bin/python"
    found = f"compressed-tensors is not installed, or llmcompressor not in {home}: it needs an older transformers"
    own = "python -m venv llmcompressor && llmcompressor/bin/pip install llmcompressor==0.14.0.1"
    raise UserError("--llmcompressor", found, "both", f"`pip install compressed-tensors && {own}`")


def flags_of_qat(settings: MethodSettings) -> str:
    """Return the flags of ``kit export`` for what ``qat`` trains for: the scheme, and the group size if it has one."""
    bits, rounds_inputs, group_size = scheme_of(settings)
    return f"--scheme=W{bits}A{8 if rounds_inputs else 16}" + (f" --group_size={group_size}" if group_size else "")


def quantise(python: Path, file: Path, asked: Mapping[str, Any]) -> None:
    """Let llmcompressor do what ``asked`` says, see the worker, and report its progress.

    Args:
        file: for ``asked``.

    Raises:
        TrainingError: llmcompressor fails.
    """
    file.write_text(json.dumps(asked))
    command = [str(python), "-I", str(_WORKER), str(file)]
    last = "no message"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        for line in worker.stdout or ():
            if found := _PROGRESS.match(line):
                begin_work("quantising", f", part {found[1]}")
            last = line.strip() or last
    if worker.returncode:
        raise TrainingError(f"llmcompressor failed: {last}; nothing was written")
