"""What a run takes of a machine's memory and of the disk, by formulas.

Promises: host memory is that of its worst moment, which is either loading or training. A machine is one with rank 0,
which takes the most.
"""

from kit.memory.workload import Workload

PROCESS_BYTES = 3 * 2**30  # Python and the libraries of one rank: assumed


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
    if workload.strategy == "offload":
        gradients = 4 * workload.trainable_parameters / workload.num_shards
        training["offloaded weights and optimiser"] = int(num_here * (share + gradients))
    if workload.async_save:  # each rank copies its shards, also those of which other ranks save a copy
        num_parts = workload.num_gpus // workload.num_replicas
        training["copies of a save"] = _checkpoint(workload) * num_here // num_parts
    worst = max(loading, training, key=lambda parts: sum(parts.values()))
    return {"Python and libraries": num_here * PROCESS_BYTES, **worst}


def _checkpoint(workload: Workload) -> int:
    moments = 0 if workload.save_only_model else 2 if "8bit" in workload.optim else 8
    return (4 + moments) * workload.trainable_parameters


def disk_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes on the disk of ``output_dir``, and of the model in the hub's cache, by what takes them."""
    # The newest is complete before an older one is deleted.
    kept_checkpoints = (workload.save_total_limit or 1) + 1 if workload.saves else 1
    full = workload.method == "full"
    return {
        "checkpoints": kept_checkpoints * _checkpoint(workload),
        "final model": (2 if full else 4) * workload.trainable_parameters,
        "the model's own files": 2 * workload.shape.num_parameters,
    }
