"""Sums in float64, also for devices without float64.

Apple's GPUs (MPS) have no float64. There, float32 values are copied to the CPU and summed in float64, so sums
are as exact as elsewhere. The host waits for the GPU at each of these copies: once per micro-batch.

Promises: on every other device nothing is moved, and every bit is the same as with ``tensor.double()``.
"""

import torch


def float64_device(device: torch.device) -> torch.device:
    """Return the device on which numbers of ``device`` are summed in float64."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in float64, on ``float64_device``. The copy comes first: MPS cannot convert to float64."""
    return tensor.to(float64_device(tensor.device)).double()
