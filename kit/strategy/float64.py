"""Sums in float64, on a device that may have none.

Apple's GPUs (MPS) have no float64. There such numbers are on the CPU, to which the float32 values that are summed are
copied, so sums are as exact as elsewhere. The host waits for the GPU at each of these copies: once a micro-batch.

Promises: on every other device nothing is moved, and every bit is the same as with ``tensor.double()``.
"""

import torch


def float64_device(device: torch.device) -> torch.device:
    """Return the device on which numbers of ``device`` are summed in float64."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in float64, on ``float64_device``. The copy comes first: MPS cannot convert to float64."""
    return tensor.to(float64_device(tensor.device)).double()
