"""Installed packages that a command does not use, and that libraries import all the same."""

import gc
import sys

from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe


def leave_out_packages(recipe: Recipe) -> None:
    """Let Python take what this recipe does not use for not installed, until the process ends.

    peft imports bitsandbytes if it is installed, transformers torchao and scipy: on two CPU cores these take 1.2, 0.3
    and 0.4 s. Call it before they are imported.

    Nothing is left out where code of others runs, which may import anything: the user's, the model's, or that of a
    process which is not the kit's own, so that ``interrupt.leave_on_ctrl_c`` was not called.
    """
    if gc.isenabled() or recipe.trust_remote_code or any(recipe.code.values()):
        return
    used = {
        "bitsandbytes": recipe.method == "qlora" or recipe.teacher_in_4bit or OPTIMISERS[recipe.optim].bitsandbytes,
        "scipy": False,
        "torchao": recipe.qat,
    }
    for name in used:
        if not used[name]:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
