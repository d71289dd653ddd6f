"""What fake tensors are taught holds for the whole process, so each test has one of its own."""

import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

BEGIN = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from kit.tools.plan.fake_tensors import take_kernels_of_cuda, teach_fake_tensors
sys.path.insert(0, "tests")
from fake_gpu_meter import GpuMeter
meter = GpuMeter()
teach_fake_tensors(meter)
take_kernels_of_cuda()
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_on_the_cpu_takes_kernels_without_scores_of_all_pairs():
    out = run("""
from kit.model.attention import varlen_attention
module = torch.nn.Module()
module.num_key_value_groups = 2
def kernels(**options):
    q, k = torch.empty(1, 4, 16, 32, dtype=torch.bfloat16), torch.empty(1, 2, 16, 32, dtype=torch.bfloat16)
    with meter.tally() as tally:
        varlen_attention(module, q, k, k, None, is_causal=True, **options)
    return " ".join(tally.attention), sum(tally.products.values())
with FakeTensorMode(allow_non_fake_inputs=True), meter:
    print(*kernels(), *kernels(cu_seq_lens_q=torch.tensor([0, 9, 16], dtype=torch.int32), max_length_q=9))
""")
    assert out.split() == ["scaled_dot_product_flash_attention_for_cpu", "0", "varlen_attn", "0"]


def test_fake_tensors_have_addresses_values_and_modules_that_move():
    out = run("""
with FakeTensorMode(allow_non_fake_inputs=True), meter:
    tensor = torch.empty(2, 3)
    assert tensor.tolist() == [[1.0] * 3] * 2
    assert tensor[1].data_ptr() == tensor.data_ptr() + 12
    layer = torch.nn.Linear(2, 2).to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16 and isinstance(layer.weight, torch.nn.Parameter)
print("done")
""")
    assert out.split() == ["done"]
