"""Bytes of the parts of a run: of a trained weight, its gradient, a 4-bit weight, a weight in ``final/``.

The only home of these numbers: formulas (``kit.memory.formulas``) and the report after running out
(``kit.memory.out_of_memory``) count with them.
"""

import math

from kit.config.settings.output import OutputSettings

WEIGHT_BYTES = 4  # of a trained weight: float32, whatever the compute dtype, but in pure bf16
GRADIENT_BYTES = 4  # of gradients that are added up
# Of adamw_bf16: elements of a weight that it updates together, and bytes of the float32 copies and random bits of each.
UPDATED_TOGETHER, UPDATED_BYTES = 1 << 23, 36
ORTHOGONALISED_BYTES = 12  # of muon at most, for each weight of the matrix that it updates
# NF4 with double quantisation: half a byte a weight; a scale in 8 bits for 64 weights, and one of float32 for 256 of
# these scales.
NF4_PACKED_BYTES = 1 / 2
NF4_TABLE_BYTES = 1 / 64 + 4 / (64 * 256)
MXFP4_BYTES = 1 / 2 + 1 / 32  # with a scale of one byte for 32 weights

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as a string with a unit: ``1.50 GiB``."""
    unit = next(name for name in reversed(UNITS) if num_bytes >= UNITS[name] or name == "bytes")
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(unit, 2)
    return f"{num_bytes / UNITS[unit]:.{digits}f} {unit}"


def num_checkpoints(settings: OutputSettings, total_steps: int | None = None) -> int | None:
    """Return the largest number of checkpoints that are on the disk at once; None if all are kept.

    A run keeps ``save_total_limit`` checkpoints and, with ``keep_best``, the best one. The newest is complete before an
    older one is deleted, so there is one more.

    Args:
        total_steps: of the run; None: not known.
    """
    saves = most = math.inf
    if not (settings.keep_best or settings.saves_by_time or settings.save_strategy == "epoch"):
        every = settings.num_save_steps
        saves = (total_steps or math.inf) / every if every >= 1 else 1 / (every or 1)
    if settings.save_total_limit:
        most = settings.save_total_limit + 1 + settings.keep_best
    number = min(saves, most)
    return None if math.isinf(number) else math.ceil(number)
