"""A meter counts what operations ask for, on real tensors as on fake ones."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.tools.plan.meter import Meter


def counted(compute):
    meter = Meter()
    with meter, meter.tally() as tally:
        compute()
    return tally


def test_products_count_twice_their_multiplications():
    tally = counted(lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    assert tally.flops == 2 * 3 * 4 * 5


def test_attention_on_a_cpu_counts_two_products_forward_and_five_backward():
    def attend():
        query, key, value = (torch.ones(1, 2, 6, 8, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    assert counted(attend).flops == 7 * 2 * (2 * 6 * 6 * 8)


def test_the_peak_of_a_backward_pass_holds_what_the_forward_pass_saved():
    weight = torch.ones(10, 10, requires_grad=True)
    meter = Meter()
    meter.hold([weight], "trainable weights")
    with meter, meter.tally() as tally:
        out = (torch.ones(10, 10) @ weight).exp()
        meter.mark("forward")
        out.sum().backward()
        meter.hold([weight.grad], "gradients")
    # The product is no longer needed: exp keeps its result, the product its left factor.
    assert tally.moments["cpu"]["forward"] == {"trainable weights": 400, "activations": 800}
    assert tally.components["cpu"]["gradients"] == 400


def test_fake_tensors_count_as_real_ones():
    def compute():
        (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).relu().sum().backward()

    real = counted(compute)
    with FakeTensorMode():
        fake = counted(compute)
    assert (fake.peaks, fake.components, fake.flops) == (real.peaks, real.components, real.flops)


def test_launches_are_operations_that_compute_and_products_move_no_elementwise_bytes():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    tally = counted(lambda: (a @ b).t().reshape(3, 5)[:, None].exp())  # a product, views, a copy, and exp
    assert tally.launches == 3
    assert tally.elementwise_bytes == 2 * (2 * 15 * 4)
