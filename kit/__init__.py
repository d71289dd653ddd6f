"""Fine-tuning recipe kit: one readable loop, every topology, the same maths.

``from kit import finetune, open_run, read_recipe``: these and what is listed in ``__all__`` are promised to Python
code (docs/quickstart.md#from-python); everything else may change. Importing ``kit`` imports nothing else.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # the first import of fcntl would end in a traceback
    from kit.system.console import show_error

    show_error(
        "error: Windows: the kit locks files and stops processes as Linux and macOS do\n"
        "    -> wsl --install, then the same commands in the shell of WSL2 (docs/quickstart.md#installation)"
    )
    raise SystemExit(2)

if TYPE_CHECKING:
    from kit.tools.api import Recipe, Run, RunFailed, UserError, finetune, open_run, read_recipe

__version__ = "0.1.0"
__all__ = ["Recipe", "Run", "RunFailed", "UserError", "__version__", "finetune", "open_run", "read_recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    from kit.tools import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
