"""What is summed in float64 stays on its device where that has float64. tests/promises/test_mac.py runs where not."""

import torch

from kit.strategy.float64 import float64_device, in_float64


def test_only_mps_sums_elsewhere():
    devices = [torch.device(name) for name in ("cpu", "cuda:1", "xpu", "mps")]
    assert [float64_device(device).type for device in devices] == ["cpu", "cuda", "xpu", "cpu"]
    assert float64_device(devices[1]).index == 1


def test_a_value_is_converted_and_not_rounded():
    values = torch.tensor([0.1, 1e-30, 3e38])
    assert in_float64(values).dtype == torch.float64
    assert torch.equal(in_float64(values).float(), values)
