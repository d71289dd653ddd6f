"""Which adapters inference servers take as they are, and the command that makes a model for them of the others.

Read in the sources of vLLM and of the converter of llama.cpp, of September 2026; neither was run here. Plain Python.
"""

import shlex
from pathlib import Path
from typing import Any

from kit.config.scripts import command_of


def merge_command(adapter: str | Path) -> str:
    """Return the command that merges the adapter in the folder ``adapter`` into its base, as an ordinary model."""
    return f"{command_of('export.py')} {shlex.quote(str(adapter))} --output_dir merged"


def why_not_served(config: Any) -> str:
    """Return why servers do not take an adapter with this ``LoraConfig``; empty if they do.

    vLLM and llama.cpp refuse what is not a product of two matrices. llama.cpp always scales by alpha / r, so it would
    take an adapter of ``use_rslora`` and apply it more weakly than it was trained.
    """
    kinds = {
        "trained rows of tokens": config.trainable_token_indices,
        "modules that trained whole": config.modules_to_save,
        "DoRA": config.use_dora,
    }
    found = [kind for kind, has_it in kinds.items() if has_it]
    if found:
        return f"vLLM and llama.cpp take no adapter with {' and '.join(found)}"
    return "llama.cpp does not know the scale of use_rslora" if config.use_rslora else ""
