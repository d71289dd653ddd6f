"""Bytes of the parts of a run: of a trained weight, its gradient and moments, a 4-bit weight, a checkpoint.

The only home of these numbers: formulas (``kit.memory.formulas``) and the report after running out
(``kit.memory.shortage``) count with them.
"""

from kit.config.optimisers import OPTIMISERS
from kit.config.settings.output import OutputSettings

WEIGHT_BYTES = 4  # of a trained weight: float32, whatever the compute dtype; see ``trained_bytes``
GRADIENT_BYTES = 4  # of gradients that are added up
# Of adamw_bf16: elements of a weight that it updates together, and bytes of the float32 copies and random bits of each.
UPDATED_TOGETHER, UPDATED_BYTES = 1 << 23, 36
ORTHOGONALISED_BYTES = 12  # of muon at most, for each weight of the matrix that it updates
# NF4 with double quantisation: half a byte a weight; a scale in 8 bits for 64 weights, and one of float32 for 256 of
# these scales.
NF4_PACKED_BYTES = 1 / 2
NF4_TABLE_BYTES = 1 / 64 + 4 / (64 * 256)
FINAL_BYTES = 2  # of a weight of a full model in ``final/``, which has the dtype of the model's files: bf16 as a rule

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as a string with a unit: ``1.50 GiB``."""
    unit = next(name for name in reversed(UNITS) if num_bytes >= UNITS[name] or name == "bytes")
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(unit, 2)
    return f"{num_bytes / UNITS[unit]:.{digits}f} {unit}"


def compute_bytes(bf16: bool) -> int:
    """Return the bytes of a frozen weight, or of a value that passes through a layer."""
    return 2 if bf16 else 4


def trained_bytes(optim: str) -> int:
    """Return the bytes of a trained weight, as the optimiser ``optim`` holds it."""
    return 2 if optim == "adamw_bf16" else WEIGHT_BYTES


def moment_bytes(optim: str, num_weights: int, num_in_matrices: int, weight_bytes: int = WEIGHT_BYTES) -> int:
    """Return the bytes of the moments of trained weights, which the optimiser ``optim`` keeps in 8 bits or as these.

    Args:
        num_in_matrices: weights among them that the layers' linear modules have.
    """
    known = OPTIMISERS[optim]
    number = known.num_moments * num_weights
    if known.moments_of_matrices is not None:
        number += (known.moments_of_matrices - known.num_moments) * num_in_matrices
    return number * (1 if known.in_8_bits else weight_bytes)


def checkpoint_bytes(num_trainable: int, optim: str, save_only_model: bool, num_in_matrices: int = 0) -> int:
    """Return the bytes of a checkpoint: the weights that train and, unless it has weights only, their moments."""
    size = trained_bytes(optim)
    moments = 0 if save_only_model else moment_bytes(optim, num_trainable, num_in_matrices, size)
    return num_trainable * size + moments


def final_bytes(method: str, num_parameters: int, num_trainable: int, dtype_bytes: int = FINAL_BYTES) -> int:
    """Return the bytes of ``final/``: the whole model in its own dtype, or an adapter in float32."""
    return num_parameters * dtype_bytes if method == "full" else num_trainable * WEIGHT_BYTES


def copied_bytes(checkpoint: int, ranks_here: int, num_processes: int, num_replicas: int) -> int:
    """Return the host memory of a machine for the copies that saves in the background are written from.

    Each rank copies its shards, also those of which other ranks save a copy.

    Args:
        checkpoint: bytes of a whole checkpoint.
        ranks_here: ranks of the machine.
        num_replicas: copies of a sharded model; 1 without hybrid sharding.
    """
    return checkpoint * ranks_here // (num_processes // num_replicas)


def num_checkpoints(settings: OutputSettings) -> int | None:
    """Return the largest number of checkpoints that are on the disk at once; None if a run keeps all.

    A run keeps ``save_total_limit`` checkpoints and, with ``keep_best``, the best one. The newest is complete before an
    older one is deleted, so there is one more.
    """
    if not settings.keep_best and (settings.save_strategy == "no" or settings.save_steps == 0):
        return 1  # the one at its end
    if settings.save_total_limit == 0:
        return None
    return settings.save_total_limit + 1 + (1 if settings.keep_best else 0)
