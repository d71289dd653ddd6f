"""The words of a command that opens a model: RUN, flags of the command alone, and flags of the recipe."""

import os
from collections.abc import Sequence
from pathlib import Path

from kit.config.command_line import read_flags
from kit.errors import Problem, UserError


def split_words(
    argv: list[str], command: str, switches: Sequence[str]
) -> tuple[dict[str, str], dict[str, str], list[Problem]]:
    """Split the words of a command whose first one may be RUN.

    Args:
        command: as typed: ``kit chat``.
        switches: its own flags without a value.

    Returns:
        Its own flags, of which a switch that is typed is ``true``; those of the recipe, with the model that RUN names;
        and the problems with both.

    Raises:
        UserError: RUN has no model yet.
    """
    positional = [] if argv[0].startswith("--") else [argv[0]]
    words = [word if word.lstrip("-") not in switches else f"{word}=true" for word in argv[len(positional) :]]
    flags, problems, _ = read_flags(words)
    own = {name: flags.pop(name) for name in switches if name in flags}
    for name in switches:
        if own.get(name) not in (None, "true", "false"):
            problems.append(Problem(f"--{name}", f"found {own[name]!r}", "no value"))
    source = positional[0] if positional else None
    if source is not None and "model_name_or_path" in flags:
        flags.setdefault("adapter_name_or_path", opened(source))
    elif source is not None:
        flags["model_name_or_path"] = opened(source)
    elif not {"model_name_or_path", "adapter_name_or_path"} & set(flags):
        problems.append(Problem("RUN", "missing", "the folder of a run, or a model", f"{command} RUN"))
    return own, flags, problems


def opened(source: str) -> str:
    """Return what to open for ``source``: of the folder of a run its ``final/``, or its newest checkpoint.

    Raises ``UserError`` if the folder of a run has neither.
    """
    from kit.checkpoint.manifest import list_checkpoints
    from kit.run.record import RUN_FILE

    folder = Path(os.path.expanduser(source))
    if not os.path.isfile(folder / RUN_FILE):
        return source
    if (folder / "final").is_dir():
        return str(folder / "final")
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise UserError(Problem("RUN", f"{source} has no final/ yet, and no checkpoint", "a run that has saved"))
    return str(checkpoints[-1])
