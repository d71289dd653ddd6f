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
from kit.export.source import Source
from kit.model.adapters.qat import check_layers, scheme_of
from kit.model.adapters.targets import is_router
from kit.system.console import begin_work
from kit.system.errors import Problem, TrainingError, UserError

# By llmcompressor's names: the bound of the mean change in nats per token, set by hand, not derived; and how many
# weights share a scale by default; None: those of a row.
SCHEMES = {
    "W4A16": (0.3, 128),
    "W4A8": (0.3, 128),
    "W8A16": (0.1, None),
    "W8A8": (0.1, None),
    "FP8_DYNAMIC": (0.1, None),
    "NVFP4": (0.4, 16),
}
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


def scheme_of_qat(settings: MethodSettings) -> tuple[str, int | None]:
    """Return the scheme of the model that ``qat`` trains for, and its group size; None: a whole row."""
    bits, rounds_inputs, group_size = scheme_of(settings)
    return f"W{bits}A{8 if rounds_inputs else 16}", group_size


def check_source(source: Source, scheme: str, group_size: int | None, rows: list[list[int]]) -> list[Problem]:
    """Return why this model cannot be quantised so, before any weight is read.

    Args:
        group_size: weights that share a scale; None: those of a row.
        rows: for calibration.
    """
    model = source.meta_model
    has_experts = any(is_router(name) for name, _ in model.named_modules())
    if has_experts or source.settings.trust_remote_code or source.config.get_text_config() is not source.config:
        found = f"{type(model).__name__} has experts, reads images or audio, or has code of its own: not tested"
        return [Problem("--format compressed-tensors", found, fix="leave it out")]
    if scheme == "NVFP4" and not rows:
        return [Problem("--scheme", "NVFP4 measures activations on training rows, and there are none", fix="W4A16")]
    return check_layers(model, group_size, "--scheme")


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
