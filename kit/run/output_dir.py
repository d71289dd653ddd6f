"""Checks of an ``output_dir`` before a run writes to it.

Promises: nothing is written.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.config.recipe import Recipe
from kit.data.samples.bad_rows import SKIPPED_FILE
from kit.failures import exits
from kit.run.identity import OTHER_DATA, differences
from kit.run.record import METRICS_FILE, RUN_FILE, fault_of_record
from kit.system import durable, lock
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, raise_if

# All outputs of a run in its folder, except run.json, the lock and temporary files. `kit` is TensorBoard's.
OUTPUT_FILES = (METRICS_FILE, SKIPPED_FILE, exits.ERROR_FILE, "report.html")
OUTPUT_FOLDERS = ("checkpoints", "final", "published", "kit")


def check_writable(folder: Path) -> None:
    """Raise ``UserError`` if ``folder`` is no folder, or cannot be made or written to."""
    try:
        parent = next(path for path in [folder, *folder.resolve().parents] if path.exists())
        if not parent.is_dir():
            raise UserError("output_dir", f"{parent} is a file", "a folder", lock.ANOTHER)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UserError("output_dir", f"{parent} cannot be written to", fix=lock.ANOTHER)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        found = f"{folder}: {getattr(error, 'strerror', None) or error}"
        raise UserError("output_dir", found, "a folder to write to", lock.ANOTHER) from None


def run_in(overwrites: bool, folder: Path, inputs: Iterable[tuple[str, str]]) -> dict[str, Any] | None:
    """Return the record of the run that the folder holds; None for an empty folder, or none.

    Args:
        overwrites: as ``overwrite_output_dir``.
        inputs: ``Recipe.inputs`` of the run that would write to the folder.

    Raises:
        UserError: the folder holds other files than a run's, a run is using it, or it cannot be used.
    """
    check_writable(folder)
    # A start that ended before it wrote run.json leaves at most these files.
    early = {lock.NAME, exits.ERROR_FILE}
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if all(name in early or durable.is_leftover(name, (RUN_FILE, exits.ERROR_FILE)) for name in names):
        raise_if(_problems_with_kinds(folder, early))
        return None
    # The kit only deletes what it wrote itself.
    fix = f"{lock.ANOTHER}; or empty it yourself"
    try:
        if RUN_FILE in names:
            own = {lock.NAME, RUN_FILE}
            # To overwrite a link means to delete it.
            own |= set() if overwrites else {*OUTPUT_FILES, *OUTPUT_FOLDERS}
            raise_if(_problems_with_kinds(folder, own))
        old = json.loads(read_small(folder / RUN_FILE))
        record = {**old, "identity": dict(old["identity"]), "finished_steps": int(old["finished_steps"])}
    except FileNotFoundError:
        raise UserError("output_dir", f"{folder} is not empty and holds no run", fix=fix) from None
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError) as error:
        found = f"{folder}/run.json is no record of a run ({fault_of_record(error)})"
        raise UserError("output_dir", found, fix=fix) from None
    lock.check_free(folder)
    if overwrites:
        raise_if(
            Problem(key, f"{value} is in the output_dir that would be overwritten", fix=lock.ANOTHER)
            for key, value in inputs
            if os.path.exists(value) and folder.resolve() in Path(value).resolve().parents
        )
    return record


def check_owner(recipe: Recipe, folder: Path, identity: Mapping[str, Any]) -> int:
    """Raise ``UserError`` if the folder holds another run, or other files than a run's.

    Returns:
        The number of steps after which the run in the folder finished; 0 if it did not, or will be overwritten.

    Raises:
        UserError: the folder holds another run (the message names the settings that differ), or as ``run_in``.
    """
    old = run_in(recipe.overwrite_output_dir, folder, recipe.inputs)
    if old is None or recipe.overwrite_output_dir:
        return 0
    fix = f"{lock.ANOTHER}; or --overwrite_output_dir true, which deletes it"
    if changed := differences(old["identity"], identity):
        was, now = old.get("recipe", {}).get("dataset"), recipe.model_dump(mode="json")["dataset"]
        if was != now:
            changed = [f"dataset: {was} -> {now}" if text == OTHER_DATA else text for text in changed]
        raise UserError("output_dir", f"{folder} holds another run ({'; '.join(changed)})", fix=fix)
    if recipe.resume_from_checkpoint == "none":
        raise UserError("output_dir", f"{folder} holds this run already", fix=fix)
    return int(old["finished_steps"])


def outputs(folder: Path) -> list[Path]:
    """Return the outputs and leftovers of runs in this folder, except ``run.json`` and the lock."""
    names = [*OUTPUT_FILES, *OUTPUT_FOLDERS]
    return [*(folder / name for name in names), *unfinished(folder), *folder.glob(".report.*.partial")]


def unfinished(folder: Path) -> list[Path]:
    """Return the temporary files of killed runs."""
    files = (RUN_FILE, METRICS_FILE, SKIPPED_FILE, exits.ERROR_FILE)
    of_files = [path for path in folder.glob(".*partial") if durable.is_leftover(path.name, files)]
    return [*of_files, durable.staging_of(folder / "final")]


def _problems_with_kinds(folder: Path, names: Iterable[str]) -> Iterator[Problem]:
    """Return a problem for each of ``names`` in ``folder`` that is a link, or a file for a folder, or the reverse.

    A link may come from whoever made the folder, and lead to files that the run would overwrite or delete.
    """

    for path in (folder / name for name in sorted(names) if os.path.lexists(folder / name)):
        mode = path.lstat().st_mode
        is_folder, expected = (stat.S_ISDIR, "a folder") if path.name in OUTPUT_FOLDERS else (stat.S_ISREG, "a file")
        if stat.S_ISLNK(mode):
            found = f"{path} is a link to {os.readlink(path)!r}"
            fix = "replace it by its target, if the link is yours; output_dir itself may be a link"
            yield Problem("output_dir", found, f"{expected}: a run writes to output_dir only", fix)
        elif not is_folder(mode):
            yield Problem("output_dir", f"{path} is not {expected}", expected, "move it away")
