"""The scripts in ``recipes/``, and what a user types to start them. Plain Python."""

import os
from pathlib import Path

from kit.config.paths import RECIPES

# Of `kit`, and their scripts.
COMMANDS = {"train": "finetune.py", "score": "score.py", "sample": "sample.py", "export": "export.py"}
# Environment variable of a script that `kit train` or its like started: the command that was typed.
TYPED_AS = "KIT_TYPED_AS"


def command_of(script: str) -> str:
    """Return what starts a script where the user stands: ``accelerate launch recipes/finetune.py``, or ``kit train``.

    The second is returned where no clone is the current folder, and to a user who typed it.

    Args:
        script: its name: ``finetune.py``.
    """
    path = Path("recipes", script)
    if TYPED_AS not in os.environ and path.is_file() and path.samefile(RECIPES / script):
        return f"{'python' if script == 'export.py' else 'accelerate launch'} {path.as_posix()}"
    return next(f"kit {command}" for command, own in COMMANDS.items() if own == script)
