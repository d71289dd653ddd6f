"""Checkpoint folders: list, verify and delete them, read manifest and state, choose one to resume from.

A checkpoint is complete if and only if its manifest exists. The manifest has the size and the hash of every file, and
names the run and the step. This module does not import torch, so a folder can be checked before the slow imports.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from kit.system import durable, lock
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, kind, raise_if

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
ALL, NONE = slice(None), slice(0)  # parts of the files, for ``verify``


def read_state(path: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the ``state`` that was given to ``Saver.save``.

    Args:
        like: default values. A key that an earlier version of the kit did not store gets the value from here.

    Raises:
        UserError: the file is damaged, or a value has another type than in ``like``.
    """
    form = {"step": 0, "optimizer_scalars": {}, **(like or {})}
    try:
        state = {**(like or {}), **json.loads(read_small(path / STATE))}
        wrong = [key for key in form if type(state[key]) is not type(form[key])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(str(path / STATE), f"not the state of a run ({error!r})") from None
    raise_if(Problem(str(path / STATE), f"{key} is {kind(state[key])} that no run leaves there") for key in wrong)
    return state


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest: ``step``, ``identity``, ``strategy`` and ``versions`` of its run, ``files``."""
    return json.loads(read_small(path / MANIFEST))


def find_checkpoint(
    folder: Path, wanted: str, say: Any, check: Callable[[Path], Sequence[str]] | None = None
) -> Path | None:
    """Find the checkpoint to resume from.

    Args:
        folder: the folder ``checkpoints`` of the run.
        wanted: ``auto`` for the newest one that is not damaged, ``none``, or the path of a checkpoint.
        say: prints a line for each damaged checkpoint that is skipped.
        check: returns the faults of a checkpoint; None: ``verify``.

    Returns:
        The checkpoint; None for ``none``, and for ``auto`` if there is no checkpoint.

    Raises:
        UserError: the checkpoint at the path is absent or damaged, or all checkpoints are.
    """
    check = check or verify
    if wanted == "none":
        return None
    if wanted != "auto":
        wanted = os.path.expanduser(wanted)
        faults = check(Path(wanted))
        if faults:
            expected = "auto, none, or a step-* folder"
            raise UserError(*(Problem("resume_from_checkpoint", f"{wanted}: {fault}", expected) for fault in faults))
        return Path(wanted)
    broken: list[Problem] = []
    for path in reversed(_folders(folder)):
        faults = check(path)
        if not faults:
            for problem in broken:
                say(f"skipping {problem}")
            return path
        broken.append(Problem(str(path), faults[0]))
    if broken:
        fix = f"{lock.ANOTHER}; or --overwrite_output_dir true, which starts again from the first step"
        raise UserError(*broken, Problem(str(folder), "no checkpoint of this run is complete", fix=fix))
    return None


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps than ``step``, and leftovers of a killed save or deletion.

    The run that resumes after ``step`` repeats the later steps.
    """
    for path in folder.glob(".step-*"):
        if re.fullmatch(r"\.step-\d{8}\.(partial|deleted)", path.name):
            durable.remove(path)
    for path in _folders(folder):
        if path.name > name_of(step):
            delete(path)


def in_the_way_after(folder: Path, step: int) -> list[Path]:
    """Return the links and files that have the name of a checkpoint after ``step``.

    ``drop_after`` keeps them, and a save could not put its checkpoint there.
    """
    return sorted(path for path in _named(folder) if path.name > name_of(step) and not _is_own_folder(path))


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps. Names sort in the order of steps."""
    return f"step-{step:08d}"


def delete(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill in between leaves no damaged checkpoint."""
    hidden = path.with_name(f".{path.name}.deleted")
    durable.remove(hidden)
    os.replace(path, hidden)
    durable.remove(hidden)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest first."""
    return [path for path in _folders(folder) if (path / MANIFEST).is_file()]


def _folders(folder: Path) -> list[Path]:
    """The folders named by ``name_of``, oldest first. A user's copies, links and other files are left out."""
    return sorted(path for path in _named(folder) if _is_own_folder(path) and not _is_renamed(path))


def _named(folder: Path) -> list[Path]:
    """All paths with a name of ``name_of``."""
    return [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]


def _is_own_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_renamed(path: Path) -> bool:
    """Whether the manifest names another step than the folder name, so a user renamed or copied the folder."""
    try:
        return name_of(read_manifest(path)["step"]) != path.name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # incomplete or damaged


def verify(path: Path, part: slice = ALL) -> list[str]:
    """Return the faults of a checkpoint; an empty list if it is complete.

    Args:
        part: which of its files, sorted by name, to read and to hash. The names and sizes of all files are compared
            anyway, and the state, which is small, is hashed anyway.
    """
    if not (path / MANIFEST).is_file():
        return [f"not a complete checkpoint (no {MANIFEST})"]
    try:
        manifest = read_manifest(path)
        own_digest = manifest.pop("xxh3_128")
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in manifest["files"].items()}
        if outside := [name for name in expected if Path(name).name != name]:
            return [f"{MANIFEST} names a file that is not in its folder: {outside[0]!r}"]
        if manifest["format"] != FORMAT:
            return [f"{MANIFEST} is of format {manifest['format']}, this kit reads {FORMAT}"]
        if own_digest != digest_of(manifest):
            return [f"{MANIFEST} was altered: its hash differs from the stored one"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    # torch reads every safetensors file in the folder, so an additional one would override tensors.
    strange = sorted({file.name for file in path.glob("*.safetensors")} - expected.keys())
    faults = [f"{name} is not one of its files" for name in strange]
    hashed = {*sorted(expected)[part], STATE}
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size} bytes, expected {size}")
        elif name in hashed and describe_file(file)["xxh3_128"] != digest:
            faults.append(f"{name} was altered: its hash differs from {MANIFEST}")
    return faults


def digest_of(manifest: dict[str, Any]) -> str:
    """Return the hash of a manifest, which must not contain ``xxh3_128``, the hash itself."""
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file: its size in bytes and its hash."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}
