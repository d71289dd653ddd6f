"""The meter of simulated GPUs counts products, casts and attention kernels."""

import torch
from fake_gpu_meter import GpuMeter


def counted(compute):
    meter = GpuMeter()
    with meter, meter.tally() as tally:
        compute()
    return tally


def test_products_are_counted_by_their_dtype():
    tally = counted(lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    assert tally.flops == 2 * 3 * 4 * 5 and tally.products == {"float32 ": 1}


def test_casts_are_counted_by_their_dtypes():
    assert counted(lambda: torch.ones(2).bfloat16().float()).casts == {
        "float32 to bfloat16": 1,
        "bfloat16 to float32": 1,
    }
