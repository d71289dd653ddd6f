"""The tensors of a checkpoint: collect them for a save, and load them under any strategy.

The strategy of the run that loads a checkpoint may differ from that of the run that saved it. A checkpoint holds
trainable weights, persistent buffers and optimiser state. Tensors are stored as safetensors, which every rank writes
through torch's distributed checkpoint (DCP); all else is JSON. Nothing is pickled.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from kit.checkpoint.manifest import read_state
from kit.strategy.weights import changing_only
from kit.system.errors import UserError


def load_checkpoint(model: torch.nn.Module, optimizer: Any, path: Path) -> None:
    """Load a checkpoint into a prepared model and optimiser. Called by all ranks.

    Raises:
        UserError: tensors are missing, have another shape, or are of another optimiser.
    """
    scalars = read_state(path)["optimizer_scalars"]
    stored = _stored(path)
    if not any(name.startswith("optimizer.") for name in stored):  # saved before the first step
        return load_weights(model, path)
    tensors, _ = _collect_all(model, optimizer)
    _read_tensors(path, tensors, stored)
    model_state, optimizer_state = _state(model, optimizer)
    for name in model_state:
        model_state[name] = tensors[f"model.{name}"]
    for name, holder, key in _optimizer_values(optimizer_state["state"]):
        holder[key] = scalars[name] if name in scalars else tensors[f"optimizer.{name}"]
    options = StateDictOptions(strict=False, ignore_frozen_params=True)
    paged = _paged_moments(optimizer)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for parameter, moments in paged.items():
        optimizer.state[parameter].update(moments)


def _paged_moments(optimizer: Any) -> dict[Any, dict[str, torch.Tensor]]:
    """The moments of each parameter in paged memory, into which a checkpoint was read.

    bitsandbytes would copy them to the GPU when it takes the state.
    """
    return {
        parameter: {key: value for key, value in state.items() if getattr(value, "is_paged", False)}
        for parameter, state in optimizer.state.items()
    }


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load only the weights of a checkpoint into a prepared model; any optimiser may have made them.

    Called by all ranks.

    Raises:
        UserError: tensors are missing or have another shape.
    """
    options = StateDictOptions(strict=False, ignore_frozen_params=True)
    set_model_state_dict(model, {**read_weights(model, path)}, options=options)


def read_weights(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint. Called by all ranks.

    They are read into the tensors of ``model``; for a tensor on the meta device, into a new one on the CPU.

    Returns:
        The tensors by their names in ``model``.

    Raises:
        UserError: tensors are missing or have another shape.
    """
    state = get_model_state_dict(model, options=StateDictOptions(strict=False, ignore_frozen_params=True))
    tensors = {
        f"model.{name}": torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        for name, tensor in changing_only(model, state).items()
    }
    stored = _stored(path)
    _read_tensors(path, tensors, {name: each for name, each in stored.items() if name.startswith("model.")})
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in the files of a checkpoint, by name."""
    return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata  # type: ignore[return-value]


def _read_tensors(path: Path, tensors: dict[str, torch.Tensor], stored: dict[str, TensorStorageMetadata]) -> None:
    """Fill ``tensors`` from the checkpoint. ``stored`` must have all of them, and no other."""
    wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
    found = {name: list(each.size) for name, each in stored.items()}
    differing = sorted(name for name in wanted.keys() | found if wanted.get(name) != found.get(name))
    if differing:
        name = differing[0]
        of_first = f"{len(differing)} tensors, for example {name}: {found.get(name, 'absent')}"
        expected = f"{wanted.get(name, 'absent')}: it belongs to another model, method or optimiser"
        raise UserError(str(path), of_first, expected)
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone())


def _state(model: torch.nn.Module, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of trainable weights, buffers and the optimiser, by plain parameter names; sharded if the model is."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return changing_only(model, model_state), optimizer_state


def collect(model: torch.nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Collect the contents of a checkpoint. Called by all ranks.

    Args:
        optimizer: None: collect only the model's state.

    Returns:
        The tensors by name, ``model.<name>`` and ``optimizer.<name>``, sharded if the model is; and the values of the
        optimiser that are not tensors.
    """
    if optimizer is None or not optimizer.state:  # without a state torch would run an optimiser step to create one
        state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        return {f"model.{name}": tensor for name, tensor in changing_only(model, state).items()}, {}
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
    """Yield (full name, mapping that holds the value, its key) for each value of an optimiser state.

    bitsandbytes nests its 8-bit values one level deeper.
    """
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _optimizer_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", state, key


def alone() -> bool:
    """Return whether this process has no process group, so is the only one."""
    return not torch.distributed.is_initialized()
