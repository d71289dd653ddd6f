"""``kit train``, ``score``, ``sample``, ``export``: start the scripts in ``recipes/``, wherever the kit is installed.

Each replaces this process by the script. So flags, exit statuses, signals and the start of several processes are those
of the script.
"""

import os
import sys
from typing import NoReturn

from kit.config.commands import COMMANDS, TYPED_AS
from kit.config.paths import RECIPES
from kit.system import interrupt

HELP = {
    "train": "fine-tune a model: recipes/finetune.py",
    "score": "evaluate a model, an adapter or a checkpoint on a dataset: recipes/score.py",
    "sample": "sample answers, and keep those that pass rewards as a dataset: recipes/sample.py",
    "export": "merge an adapter, or export a checkpoint, GGUF files or quantised weights: recipes/export.py",
}


def start(command: str, argv: list[str]) -> NoReturn:
    """Replace this process by the script of ``command``, with the words ``argv``."""
    words = [sys.executable, str(RECIPES / COMMANDS[command]), *argv]
    interrupt.become(words, {**os.environ, TYPED_AS: f"kit {command}"})
