"""Installed packages that a run does not use, and that libraries import all the same."""

import sys

from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe


def leave_out_packages(recipe: Recipe) -> None:
    """Let Python take what this run does not use for not installed, until the process ends.

    peft imports bitsandbytes if it is installed, transformers torchao and scipy: on two CPU cores these take 1.2, 0.3
    and 0.4 s. Call it in a process of the run's own, before them. Where other people's code runs in it, which may
    import anything, nothing is left out.
    """
    if recipe.trust_remote_code or recipe.report_to or any(recipe.code.values()):
        return
    in_4_bit = recipe.method == "qlora" or recipe.teacher_in_4bit
    used = {"torchao": recipe.qat, "bitsandbytes": in_4_bit or OPTIMISERS[recipe.optim].bitsandbytes, "scipy": False}
    for name in used:
        if not used[name]:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
