"""What is in a checkpoint, whether it is whole, and which one to continue from.

A checkpoint is complete if and only if its manifest is there, which has the size and the hash of every file, and says
which run and step it is of. Needs no torch: a folder can be looked at before anything heavy is imported.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from kit.errors import Problem, UserError, kind, raise_if

MANIFEST = "manifest.json"


STATE = "state.json"


FORMAT = 1


def read_state(path: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``state`` given to ``Saver.save``; what an earlier version did not keep is as in ``like``.

    Raises:
        UserError: it is not of the form of ``like``: values of these types, numbers in lists and objects.
    """
    form = {"step": 0, "optimizer_scalars": {}, **(like or {})}
    try:
        state = {**(like or {}), **json.loads((path / STATE).read_text(encoding="utf-8"))}
        wrong = [key for key in form if type(state[key]) is not type(form[key]) or not _is_numeric(state[key])]
        wrong += ["step"] if not wrong and state["step"] < 0 else []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(Problem(str(path / STATE), f"no state of a run ({error!r})")) from None
    raise_if(Problem(str(path / STATE), f"{key} is {kind(state[key])} that no run leaves there") for key in wrong)
    return state


def _is_numeric(value: Any) -> bool:
    """Whether there are only numbers in a list or an object; text is no matter where it stands alone."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(_is_numeric(each) and not isinstance(each, str | bool | None) for each in inner)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself and of its run: ``identity``, ``strategy``, ``versions``, ``files``."""
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))


def find_checkpoint(folder: Path, wanted: str, say: Any) -> Path | None:
    """The checkpoint to resume from: the newest that verifies (``auto``), the one named, or None.

    Raises:
        UserError: the one named is absent or broken.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        wanted = os.path.expanduser(wanted)
        faults = verify(Path(wanted))
        if faults:
            expected = "auto, none, or a step-* folder"
            raise UserError(*(Problem("resume_from_checkpoint", f"{wanted}: {fault}", expected) for fault in faults))
        return Path(wanted)
    broken: list[Problem] = []
    for path in reversed(_folders(folder)):
        faults = verify(path)
        if not faults:
            for problem in broken:
                say(f"skipping {problem}")
            return path
        broken.append(Problem(str(path), faults[0]))
    if broken:
        ways = "move them away to start again from the first step"
        raise UserError(*broken, Problem(str(folder), "no checkpoint of this run is whole", fix=ways))
    return None


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints a run leaves behind by going on after ``step``, and what a killed save left."""
    for path in _folders(folder):
        if path.name > name_of(step):
            delete(path)
    for path in folder.glob(".step-*"):
        if re.fullmatch(r"\.step-\d{8}\.(partial|deleted)", path.name):
            shutil.rmtree(path)


def name_of(step: int) -> str:
    """The folder of the checkpoint after ``step`` steps; in the order of steps."""
    return f"step-{step:08d}"


def delete(path: Path) -> None:
    """Delete a checkpoint; a kill in between leaves none that looks damaged."""
    hidden = path.with_name(f".{path.name}.deleted")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in _folders(folder) if (path / MANIFEST).is_file()]


def _folders(folder: Path) -> list[Path]:
    """Those that ``name_of`` names, oldest first; a user's copies, links and notes beside them are not ours."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]
    return sorted(path for path in found if path.is_dir() and not path.is_symlink() and not _is_renamed(path))


def _is_renamed(path: Path) -> bool:
    """Whether it says that it is of another step than its name."""
    try:
        return name_of(read_manifest(path)["step"]) != path.name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # incomplete or damaged


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, read from its bytes; an empty list when it is whole."""
    if not (path / MANIFEST).is_file():
        return [f"not a complete checkpoint (no {MANIFEST})"]
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        own_digest = manifest.pop("xxh3_128")
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in manifest["files"].items()}
        expected[STATE], [manifest.get(name, {}).keys() for name in ("identity", "strategy", "versions")]
        if outside := [name for name in expected if Path(name).name != name]:
            return [f"{MANIFEST} names a file that is not in its folder: {outside[0]!r}"]
        if manifest["format"] != FORMAT:
            return [f"{MANIFEST} is of format {manifest['format']}, this kit reads {FORMAT}"]
        if own_digest != digest_of(manifest):
            return [f"{MANIFEST} was altered: its hash differs from what it says"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    # Every such file in the folder is read, and would replace another.
    strange = sorted({file.name for file in path.glob("*.safetensors")} - expected.keys())
    faults = [f"{name} is not one of its files" for name in strange]
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size} bytes, expected {size}")
        elif describe_file(file)["xxh3_128"] != digest:
            faults.append(f"{name} was altered: its hash differs from {MANIFEST}")
    return faults


def digest_of(manifest: dict[str, Any]) -> str:
    """Of a manifest without its own."""
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and hash, read from the disk in small pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}
