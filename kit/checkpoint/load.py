"""Checkpoints: what is in one, whether it is whole, and loading it under any strategy.

A checkpoint holds what training changes (trainable weights, optimiser, step) and nothing a pickle could hide in:
tensors are safetensors written by every rank through torch's distributed checkpoint, the rest is JSON. It is complete
if and only if its manifest is there, which has the size and the hash of every file, and says whose it is.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from kit.config.recipe import Recipe
from kit.errors import Problem, UserError, kind, raise_if
from kit.model.locate import recipe_of_run
from kit.strategy.accelerator import trainable_only

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


def load_checkpoint(model: torch.nn.Module, optimizer: Any, path: Path) -> None:
    """Load into a prepared model and optimiser, whatever strategy wrote it. Called by all ranks.

    Raises:
        UserError: tensors are missing or of another shape.
    """
    scalars = read_state(path)["optimizer_scalars"]
    stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    if not any(name.startswith("optimizer.") for name in stored):  # no step had changed it yet
        return load_weights(model, path)
    tensors, wanted = _collect_all(model, optimizer)
    _read_tensors(path, tensors)
    if {name: type(value) for name, value in scalars.items()} != {name: type(value) for name, value in wanted.items()}:
        raise UserError(Problem(str(path / STATE), "optimizer_scalars belong to another model, method or optimiser"))
    model_state, optimizer_state = _state(model, optimizer)
    for name in model_state:
        model_state[name] = tensors[f"model.{name}"]
    for name, holder, key in _optimizer_values(optimizer_state["state"]):
        holder[key] = scalars[name] if name in scalars else tensors[f"optimizer.{name}"]
    options = StateDictOptions(strict=False, ignore_frozen_params=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into a prepared model, whichever optimiser they came from. Called by all ranks.

    Raises:
        UserError: tensors are missing or of another shape.
    """
    options = StateDictOptions(strict=False, ignore_frozen_params=True)
    set_model_state_dict(model, {**read_weights(model, path)}, options=options)


def read_weights(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights by their names in ``model``, read into the model's own tensors where these have memory,
    else into new ones. Called by all ranks.

    Raises:
        UserError: tensors are missing or of another shape.
    """
    state = get_model_state_dict(model, options=StateDictOptions(strict=False, ignore_frozen_params=True))
    tensors = {
        f"model.{name}": torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        for name, tensor in trainable_only(model, state).items()
    }
    _read_tensors(path, tensors, prefix="model.")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _read_tensors(path: Path, tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
    """Fill ``tensors`` from the checkpoint, which must hold these, and no others that begin with ``prefix``."""
    reader = HuggingFaceStorageReader(str(path))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    sizes = {name: entry.size for name, entry in stored.items() if name.startswith(prefix)}
    problems = [
        Problem(str(path), f"no tensor {name}", str(list(tensors[name].shape))) for name in tensors.keys() - sizes
    ]
    problems += [Problem(str(path), f"tensor {name} has no place in this model") for name in sizes.keys() - tensors]
    problems += [
        Problem(str(path), f"{name} has shape {list(sizes[name])}", str(list(tensors[name].shape)))
        for name in tensors.keys() & sizes
        if sizes[name] != tensors[name].shape
    ]
    if problems:
        shown = sorted(problems, key=str)[:5]
        raise UserError(*shown, Problem(str(path), "belongs to another model, method or optimiser"))
    dcp.load(tensors, storage_reader=reader, no_dist=alone())


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


def recipe_of(path: Path, recipe: Recipe, where: str, base: str | None = None) -> Recipe:
    """What opens the model that a checkpoint's weights belong to: ``kit.model.locate.recipe_of_run`` of its run.

    Raises:
        UserError: the checkpoint is broken (at ``where``), or not in the folder of its run.
    """
    raise_if(Problem(where, f"{path}: {fault}") for fault in verify(path))
    return recipe_of_run(recipe, path.parent.parent / "run.json", base)


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


def _state(model: torch.nn.Module, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of what trains, by plain parameter names under every strategy; sharded where the model is."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return trainable_only(model, model_state), optimizer_state


def collect(model: torch.nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Flat tensors for the checkpoint, sharded where the model is, and the optimiser's values that are none."""
    if not optimizer.state:  # torch would make one step of it, to have something to tell
        state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        return {f"model.{name}": tensor for name, tensor in trainable_only(model, state).items()}, {}
    return _collect_all(model, optimizer)


def _collect_all(model: torch.nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model_state, optimizer_state = _state(model, optimizer)
    tensors = {f"model.{name}": tensor for name, tensor in model_state.items()}
    scalars = {}
    for name, holder, key in _optimizer_values(optimizer_state["state"]):
        if isinstance(holder[key], torch.Tensor):
            # bitsandbytes shares these between parameters, and safetensors stores no tensor twice.
            tensors[f"optimizer.{name}"] = holder[key].clone() if key.startswith("qmap") else holder[key]
        else:
            scalars[name] = holder[key]
    return tensors, scalars


def _optimizer_values(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every value by its full name, with the mapping that holds it; bitsandbytes nests its 8-bit ones one deeper."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _optimizer_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", state, key


def alone() -> bool:
    """Whether this is the only process."""
    return not torch.distributed.is_initialized()
