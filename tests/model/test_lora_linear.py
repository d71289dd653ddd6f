"""A frozen layer with an adapter computes what peft does, in fewer operations; elsewhere peft's own code answers."""

from copy import deepcopy

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model

from kit.model.lora_linear import install_lora_linear

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


def results(model, dtype=torch.float32, autocast=False, num_rows=3):
    """The output, and the gradients of the input and of what trains."""
    torch.manual_seed(1)
    x = torch.randn(num_rows, 7, INPUTS).bfloat16().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(torch.randn(num_rows, 7, OUTPUTS).bfloat16().to(y.dtype))
    return [y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_outputs_and_gradients_are_those_of_peft():
    for four_bit in [False, True]:
        for has_bias in [False, True]:
            case = four_bit, has_bias
            theirs = adapted(four_bit=four_bit, has_bias=has_bias)
            ours = with_function(theirs)
            for one, other in zip(results(ours), results(theirs), strict=True):
                assert one.dtype == other.dtype == torch.float32, case
                assert (one - other).abs().max() < 1e-6 * other.abs().max(), case  # sums are rounded in another order


def test_under_autocast_errors_are_no_larger_than_those_of_peft():
    theirs = adapted(torch.bfloat16)
    ours = with_function(theirs)
    exact = results(deepcopy(theirs).double(), torch.float64)
    mine, of_peft = (results(model, torch.bfloat16, autocast=True) for model in (ours, theirs))
    for value, other, reference in zip(mine, of_peft, exact, strict=True):
        assert value.dtype == other.dtype  # of an adapter's gradients float32
        errors = [(each.double() - reference).norm() / reference.norm() for each in (value, other)]
        assert errors[0] < 1.05 * errors[1] and errors[0] < 5e-3


def test_it_follows_when_adapters_are_switched_merged_and_added():
    theirs = adapted()
    ours = with_function(theirs)
    x = torch.randn(5, INPUTS)
    base = ours.base_model.model.layer.base_layer(x)
    assert not torch.allclose(ours(x), base)
    with ours.disable_adapter():
        assert torch.equal(ours(x), base)
    for model in (ours, theirs):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False))
    theirs.load_state_dict(ours.state_dict())
    for names in ("second", ["default", "second"]):
        for model in (ours, theirs):
            model.base_model.set_adapter(names)
        assert torch.allclose(ours(x), theirs(x), atol=1e-5) and not torch.allclose(ours(x), base)
    expected = ours(x)
    ours.merge_adapter()
    assert torch.allclose(ours(x), expected, atol=1e-5)


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
