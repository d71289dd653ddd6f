"""A frozen layer with an adapter computes what peft does, in fewer operations; elsewhere peft's own code runs."""

from copy import deepcopy

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from kit.model.layers import checkpointing
from kit.model.layers.lora_linear import install_lora_linear

INPUTS, OUTPUTS, RANK = 64, 96, 4


def adapted(dtype=torch.float32, four_bit=False, has_bias=False, **options):
    """peft's model of one frozen layer whose adapter is not zero."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(INPUTS, OUTPUTS, has_bias).to(dtype))
    if four_bit:
        weight = bnb.nn.Params4bit(model.layer.weight.data, requires_grad=False, quant_type="nf4")
        model.layer = bnb.nn.Linear4bit(INPUTS, OUTPUTS, has_bias, compute_dtype=dtype, quant_type="nf4")
        model.layer.weight = weight
        model.to("cpu")  # quantises
        model.is_loaded_in_4bit = True
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=12, target_modules=["layer"], **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) / 8
    model.base_model.model.layer.cast_input_dtype_enabled = False
    return model


def with_function(model):
    """A copy in which the function is installed."""
    model = deepcopy(model)
    install_lora_linear(model)
    return model


def results(model, dtype=torch.float32, autocast=False):
    """The output, and the gradients of the input and of what trains."""
    torch.manual_seed(1)
    x = torch.randn(3, 7, INPUTS).bfloat16().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(torch.randn(3, 7, OUTPUTS).bfloat16().to(y.dtype))
    return [y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_outputs_and_gradients_are_those_of_peft():
    for four_bit, has_bias in ((False, False), (False, True), (True, True)):
        theirs = adapted(four_bit=four_bit, has_bias=has_bias)
        for one, other in zip(results(with_function(theirs)), results(theirs), strict=True):
            assert one.dtype == other.dtype == torch.float32
            assert (one - other).abs().max() < 1e-6 * other.abs().max()  # sums are rounded in another order


def test_under_autocast_errors_are_no_larger_than_those_of_peft():
    theirs = adapted(torch.bfloat16)
    exact = results(deepcopy(theirs).double(), torch.float64)
    ours, of_peft = (results(each, torch.bfloat16, autocast=True) for each in (with_function(theirs), theirs))
    for value, other, reference in zip(ours, of_peft, exact, strict=True):
        assert value.dtype == other.dtype  # of an adapter's gradients float32
        errors = [(each.double() - reference).norm() / reference.norm() for each in (value, other)]
        assert errors[0] < 1.05 * errors[1] and errors[0] < 5e-3


def test_a_base_that_trains_or_computes_something_else_is_left_to_peft():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    theirs = adapted()
    theirs.base_model.model.layer.base_layer.__class__ = Doubled
    assert all(map(torch.equal, results(with_function(theirs)), results(theirs)))
    theirs = adapted()
    theirs.base_model.model.layer.base_layer.weight.requires_grad_()
    assert len(results(with_function(theirs))) == 5  # with the gradient of the base


class Attention(torch.nn.Module):
    """Three layers that read one input, and one that reads what they make."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = torch.nn.Identity()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(INPUTS, n) for n in (96, 32, 32))
        self.o_proj = torch.nn.Linear(32, INPUTS)

    def forward(self, x, other=None):
        other = x if other is None else other
        gate = torch.sigmoid(self.q_proj(x).sum(-1, keepdim=True))
        return self.o_proj(self.k_proj(other) + gate * self.v_proj(other))


def of_attention(is_ours, x, other=None, checkpoint=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention(), Attention())
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, **options))
    model.double()
    if is_ours:
        install_lora_linear(model)
    first, second = model.base_model.model
    x = x.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(first, x, other, **checkpoint) if checkpoint else first(x, other)
    second(y).square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_layers_that_read_one_input_are_computed_together_and_as_peft_does():
    x, other = torch.randn(2, 2, 5, INPUTS, dtype=torch.float64)
    keeps = {"use_reentrant": False, "context_fn": checkpointing._contexts}
    ranks = {"rank_pattern": {"k_proj": 7}, "alpha_pattern": {"k_proj": 21}}  # of k, another scale and another rank
    for case in ({}, {"other": other}, ranks, {"checkpoint": keeps}, {"checkpoint": {"use_reentrant": False}}):
        theirs = of_attention(False, x, **case)
        ours = of_attention(True, x, **case)
        for one, reference in zip(ours, theirs, strict=True):
            assert (one - reference).abs().max() < 1e-13 * reference.abs().max(), case


def test_compiled_adapters_add_their_products_in_place():
    from torch._inductor.utils import run_and_get_code

    model = with_function(adapted(torch.bfloat16))
    compiled = torch.compile(model, dynamic=True)
    x = torch.randn(3, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    _, code = run_and_get_code(lambda: compiled(x).sum().backward())
    lines = [line for each in code for line in each.splitlines()]
    # Of y and of dx there is one product each into a new tensor; with `beta=0` nothing is copied.
    assert sum("add_product_" in line and "torch.ops" in line for line in lines) == 2
    assert all("beta=0" in line for line in lines if "extern_kernels.addmm" in line)


def test_adapters_of_layers_that_read_one_input_are_cast_together_and_their_gradients_too():
    class Casts(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.num += function is torch.ops.aten._to_copy.default
            return out

    model = get_peft_model(Attention().bfloat16(), LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    install_lora_linear(model)
    x = torch.randn(2, 5, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        y = model(x)
        y.sum().backward()
    assert casts.num == 2
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters() if p.requires_grad)
