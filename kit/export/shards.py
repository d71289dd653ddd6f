"""Write the weights of a full model as safetensors files that ``from_pretrained`` opens, shard by shard.

Promises:

- The files hold what the model's own ``state_dict`` holds: frozen weights and persistent buffers too. Weights that are
  tied are written once.
- All ranks write, in turns. Beside the model, a rank holds one gathered tensor and one shard of at most
  ``MAX_SHARD_BYTES`` (or one tensor that is larger), however large the model is.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kit import durable
from kit.checkpoint.tensor_files import write_tensors
from kit.strategy.rendezvous import from_main
from kit.strategy.weights import gather_tensor, plain_name, rank_and_world

MAX_SHARD_BYTES = 5 * 10**9


def write_weights(
    folder: Path,
    model: Any,
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Write all weights, and their index if they need several files. Called by all ranks.

    Args:
        folder: exists, on a disk that all ranks share.
        model: without wrappers around it.
        state: its parameters and persistent buffers by their names in it, sharded if it is.
        dtype: of the parameters in the files. Buffers keep theirs: some decide where a token is routed.

    Raises:
        OSError: a file cannot be written.
    """
    rank, world = rank_and_world()
    parameters = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    names = _without_ties(model, state)
    dtypes = {name: dtype if name in parameters else state[name].dtype for name in names}
    renamed = from_main(lambda: _names_in_files(model, {name: state[name] for name in names}))
    if renamed is None:
        # Some families split, fuse or transpose weights as they are saved, over several tensors at once. transformers
        # does this on all weights together, so the main process gathers them all, in the dtype of the files.
        whole = dict(_gathered(state, names, dtypes, on_rank=0))
        if rank == 0:
            model.save_pretrained(folder, state_dict=whole, max_shard_size=MAX_SHARD_BYTES)
        return
    shards = _split({name: state[name].size().numel() * dtypes[name].itemsize for name in names})
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:  # while one rank writes a shard, the next one collects its own
        for number, (file, shard) in enumerate(zip(files, shards, strict=True)):
            writer = number % world
            if writer == rank and writing is not None:
                writing.result()  # so that this rank holds one shard, not two
            tensors = {renamed[name]: tensor for name, tensor in _gathered(state, shard, dtypes, on_rank=writer)}
            if writer == rank:
                writing = thread.submit(write_tensors, folder / file, tensors, {"format": "pt"})
            del tensors
        if writing is not None:
            writing.result()
    if rank == 0 and len(shards) > 1:
        sizes = {
            "total_parameters": sum(state[name].size().numel() for name in names if name in parameters),
            "total_size": sum(state[name].size().numel() * dtypes[name].itemsize for name in names),
        }
        files_by_name = {renamed[name]: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": sizes, "weight_map": files_by_name}
        durable.write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _without_ties(model: Any, state: Mapping[str, torch.Tensor]) -> list[str]:
    """The names to write: of weights that are tied, those that ``from_pretrained`` ties the others to."""
    names_of = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(plain_name(name))
    left_out = set(model._keys_to_ignore_on_save or ())
    for names in names_of.values():
        derived = [name for name in sorted(names) if name in model.all_tied_weights_keys]
        left_out.update(derived[: len(names) - 1])  # one stays, whatever the model declares
    return [name for name in state if name not in left_out]


def _names_in_files(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """The name in files of each tensor, as ``save_pretrained`` would choose it; None if it would change tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: torch.empty(tensor.size(), dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    names = {id(tensor): name for name, tensor in shapes.items()}
    try:
        converted = revert_weight_conversion(model, dict(shapes))
    except (RuntimeError, ValueError, KeyError, NotImplementedError):  # not possible on shapes alone
        return None
    renamed = {names[id(tensor)]: name for name, tensor in converted.items() if id(tensor) in names}
    return renamed if len(renamed) == len(converted) == len(shapes) else None


def _gathered(
    state: Mapping[str, torch.Tensor], names: list[str], dtypes: Mapping[str, torch.dtype], on_rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors in CPU memory, on the rank ``on_rank``; nothing on the others. Called by all ranks."""
    for name in names:
        whole = gather_tensor(state[name], on_rank)
        if whole is not None:
            yield name, whole.detach().to(dtypes[name]).cpu()


def _split(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide names, in their order, into shards of at most ``MAX_SHARD_BYTES``; a larger tensor has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
