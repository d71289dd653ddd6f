"""The checkpoint that a run resumes from.

Promises: before a weight is read from a checkpoint, each of its bytes was hashed, by one of the ranks. All ranks choose
the same checkpoint: if the newest is damaged, the one before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.checkpoint.manifest import NONE, find_checkpoint, list_checkpoints, read_manifest, verify
from kit.config.commands import command_of
from kit.config.settings.output import OutputSettings
from kit.run.identity import differences
from kit.run.record import RUN_FILE
from kit.strategy.processes.launcher import launched_rank
from kit.strategy.processes.rendezvous import together
from kit.system.console import say
from kit.system.durable import read_object
from kit.system.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


def choose(
    folder: Path, wanted: str, identity: Mapping[str, Any], accelerator: "Accelerator | None" = None
) -> tuple[Path | None, dict[str, Any]]:
    """Choose the checkpoint to resume from. Called by all ranks, also before the rendezvous.

    Before it, a rank compares only names and sizes. After it, each rank hashes its share of the files, and skipped
    checkpoints are reported.

    Args:
        folder: the folder ``checkpoints`` of the run.
        wanted: as ``find_checkpoint`` takes it.
        identity: of this run.
        accelerator: None before the rendezvous.

    Returns:
        The checkpoint and its manifest; None and {} for none.

    Raises:
        UserError: the checkpoint is absent, damaged, or of another run; with an accelerator on all ranks.
    """
    launched = launched_rank()
    check: Callable[[Path], Sequence[str]] = verify
    tell: Callable[[str], None] = say
    if accelerator:
        check = partial(verify_together, accelerator)
    elif launched and launched.world > 1:
        check, tell = partial(verify, part=NONE), lambda line: None
    with _readable(folder):
        path = find_checkpoint(folder, wanted, tell, check)
        if path is None:
            return None, {}
        manifest = read_manifest(path)
    if changed := differences(manifest["identity"], identity):
        found = f"{path} is of another run ({'; '.join(changed)})"
        fix = f"{command_of('export.py')} exports it as a model; a new run may start from it"
        raise UserError("resume_from_checkpoint", found, "a checkpoint of a run with these settings", fix)
    return path, manifest


def verify_together(accelerator: "Accelerator", path: Path) -> list[str]:
    """Return the faults of a checkpoint on all ranks; each hashes its share of the files. Called by all ranks.

    Raises:
        UserError: on all ranks, if one of them cannot read a file.
    """
    from accelerate.utils import gather_object

    faults: list[str] = []
    with together(accelerator), _readable(path):
        faults = verify(path, slice(accelerator.process_index, None, accelerator.num_processes))
    return list(dict.fromkeys(gather_object(faults)))  # all ranks find the same sizes


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = str(error.filename or path)
        raise UserError(where, f"cannot be read ({error.strerror or error})") from None


def wanted_checkpoint(settings: OutputSettings, folder: Path) -> str:
    """Return the setting ``resume_from_checkpoint``, but ``auto`` for a path from which this run has started already.

    The same command again must resume from the newest checkpoint, not from the path again.
    """
    wanted = settings.resume_from_checkpoint
    if settings.overwrite_output_dir:  # the checkpoints in the folder will be deleted
        return "none" if wanted == "auto" else wanted
    recipe = read_object(folder / RUN_FILE).get("recipe", {})
    is_obeyed = recipe.get("resume_from_checkpoint") == wanted
    return "auto" if is_obeyed and list_checkpoints(folder / "checkpoints") else wanted
