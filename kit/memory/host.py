"""Host memory of a machine, and the host memory and disk space that a run needs, by formulas.

Promises: host memory is that of its worst moment: loading, training, or writing ``final/``. A machine is one with rank
0, which takes the most.
"""

from pathlib import Path

import psutil

from kit.memory.activations import offloaded
from kit.memory.sizes import MXFP4_BYTES, WEIGHT_BYTES
from kit.memory.workload import Workload

CGROUP = Path("/sys/fs/cgroup")
PROCESS_BYTES = 3 * 2**30  # Python and the libraries of one rank: assumed


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory of this machine, and those that are free; within the limit of a container."""
    own = psutil.virtual_memory()
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = (CGROUP / "memory.current").read_text().strip()
        if limit != "max":
            return min(own.total, int(limit)), min(own.available, int(limit) - int(used))
    except (OSError, ValueError):  # no control group of version 2
        pass
    return own.total, own.available


def host_bytes(workload: Workload, share: float, whole: int) -> dict[str, int]:
    """Return the bytes of a machine's memory, by what takes them.

    Args:
        share: bytes of weights and optimiser of one GPU, which wait in host memory if they are offloaded.
        whole: bytes of all weights, as they are loaded.
    """
    num_here = min(workload.num_gpus, workload.gpus_per_machine)
    loading: dict[str, int] = {}
    training: dict[str, int] = {}
    if workload.sharded:  # rank 0 reads all weights, and sends them to all others, whichever copy they share
        loading["loading"] = whole
    if workload.strategy.offloads:
        gradients = workload.gradient_bytes * workload.trainable_parameters / workload.num_shards
        training["offloaded weights and optimiser"] = int(num_here * (share + gradients))
    if workload.keeps_initial_weights:
        of_gpu = workload.weight_bytes * workload.trainable_parameters // workload.num_shards
        training["initial weights (reference)"] = num_here * of_gpu
    writing = dict(training)
    training |= _published(workload)
    if workload.method == "full":  # rank 0 gathers all weights
        writing["gathered final model"] = workload.file_bytes * workload.shape.num_parameters
    if inputs := workload.tokens * offloaded(workload):
        pinned = 1 << (inputs - 1).bit_length()  # torch rounds each up to a power of two
        training["offloaded activations"] = num_here * workload.shape.num_layers * pinned
    if workload.async_save:
        # Each rank copies its shards, also those of which other ranks save a copy.
        ranks_of_a_copy = workload.num_gpus // workload.num_replicas
        training["asynchronous checkpoint"] = _checkpoint(workload) * num_here // ranks_of_a_copy
    worst = max(loading, training, writing, key=lambda parts: sum(parts.values()))
    return {"Python and libraries": num_here * PROCESS_BYTES, **worst}


def disk_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes on the disk of ``output_dir``, and of the model in the hub's cache, by what takes them.

    Where a run keeps all checkpoints, the bytes are those of one.
    """
    if workload.num_checkpoints is None:
        checkpoints = {"each checkpoint (all are kept)": _checkpoint(workload)}
    else:
        checkpoints = {"checkpoints": workload.num_checkpoints * _checkpoint(workload)}
    plain = workload.file_bytes * workload.shape.num_parameters
    own = plain - int((workload.file_bytes - MXFP4_BYTES) * workload.shape.in_mxfp4)
    return {
        **checkpoints,
        # An adapter is in float32, a full model has the dtype of its files.
        "final model": plain if workload.method == "full" else WEIGHT_BYTES * workload.trainable_parameters,
        **_published(workload),
        "base model's own files": own,
        **({"teacher's own files": workload.file_bytes * workload.teacher.num_parameters} if workload.teacher else {}),
    }


def _published(workload: Workload) -> dict[str, int]:
    """Bytes of all weights as they train: rank 0 gathers and writes them, if a vLLM server generates the rollouts."""
    size = workload.weight_bytes * workload.shape.num_parameters
    return {"weights for the vLLM server": size} if workload.publishes else {}


def _checkpoint(workload: Workload) -> int:
    """Bytes of a checkpoint: the trainable weights and, unless it has weights only, their moments."""
    moments = 0 if workload.save_only_model else workload.moment_bytes
    return workload.weight_bytes * workload.trainable_parameters + moments
