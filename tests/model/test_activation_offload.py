"""Layers' inputs that wait in host memory give every bit, and nothing is released before its copy is done."""

import weakref

import pytest
import torch
from model_helpers import BF16, FP32, build

from kit.config.recipe import Recipe
from kit.model.activation_offload import install_activation_offload

TINY, NUM_LAYERS = "recipes/tiny/model", 4


class Runtime:
    """Stands for ``torch.cuda``: writes down what the streams are asked for, and copies at once."""

    def __init__(self):
        self.asked = []  # "copy" and "wait", each with the number of the copy
        self.num_copies = 0

    def Stream(self):
        return self

    current_stream = Stream

    def stream(self, stream):
        return self

    def __enter__(self):
        self.num_copies += 1
        self.asked.append(("copy", self.num_copies))

    def __exit__(self, *args):
        pass

    def wait_stream(self, stream):
        assert stream is self

    def Event(self):
        return Event(self.num_copies)

    def wait_event(self, event):
        self.asked.append(("wait", event.number))


class Event:
    def __init__(self, number):
        self.number = number

    def record(self, stream):
        pass


def model_of(plan=FP32, offloads=True, **settings):
    settings = {"gradient_checkpointing": True, "method": "lora"} | settings
    recipe = Recipe(model_name_or_path=TINY, dataset="x.jsonl", activation_offload=offloads, **settings)
    return build(recipe, plan)


def passed(model, seed=0, autocast=False, length=40):
    """The losses of a batch."""
    inputs = torch.arange(2 * length).reshape(2, length) * 7 % 1000
    positions = torch.arange(0, 2 * length, 3)
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(input_ids=inputs, target_positions=positions, targets=positions)


def trained(model, **options):
    """The losses of two micro-batches of different lengths, and the gradients."""
    losses = [passed(model, seed=i, length=length, **options) for i, length in enumerate((40, 23))]
    for each in reversed(losses):  # both graphs are there at once
        each.sum().backward()
    return [each.detach() for each in losses] + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (FP32, {"method": "full"}),
        (FP32, {"gradient_checkpointing": "selective", "lora_dropout": 0.3}),
        (BF16, {"method": "qlora"}),
    ],
    ids=["full", "lora, selective", "qlora"],
)
def test_losses_and_gradients_are_the_same_bit_for_bit(plan, settings):
    expected, found = (
        trained(model_of(plan, offloads, **settings), autocast=plan is BF16) for offloads in (False, True)
    )
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_each_input_is_copied_out_and_all_but_the_last_back_in_the_order_of_their_use(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    model = model_of()
    for _ in range(2):
        runtime.asked.clear()
        runtime.num_copies = 0
        loss = passed(model).sum()
        assert runtime.asked == [
            ("copy", 1),
            *(asked for i in range(1, NUM_LAYERS) for asked in (("wait", i), ("copy", i + 1))),
        ]
        loss.backward()
        back = runtime.asked[2 * NUM_LAYERS - 1 :]
        assert back == [
            *(asked for i in range(NUM_LAYERS, 2 * NUM_LAYERS - 1) for asked in (("wait", i), ("copy", i + 1))),
            ("wait", 2 * NUM_LAYERS - 1),
        ]


def test_what_is_copied_lives_until_the_computing_stream_has_waited_for_the_copy(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    model = model_of()
    states = []

    def keep(module, args):
        states.append(weakref.ref(args[0].untyped_storage()))

    for layer in model.get_base_model().model.layers:
        layer.register_forward_pre_hook(keep)
    loss = passed(model).sum()
    alive = [each() is not None for each in states]
    assert alive == [False] * (NUM_LAYERS - 1) + [True]  # the copy of the last one may still be under way
    del loss
    assert states[-1]() is not None


def test_passes_without_gradients_and_evaluations_copy_nothing(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    model = model_of()
    with torch.no_grad():
        passed(model)
    passed(model.eval())
    assert not runtime.asked


def test_a_layer_that_fails_leaves_no_hook_behind():
    model = model_of()
    layers = model.get_base_model().model.layers
    plain = layers[1].forward
    layers[1].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        passed(model)
    layers[1].forward = plain
    x = torch.ones(3, requires_grad=True)
    assert (x * x).grad_fn._saved_self is x


def test_nothing_is_installed_without_checkpointing():
    assert not any(m._forward_hooks for m in model_of(gradient_checkpointing=False).modules())
    plain = torch.nn.Linear(2, 2)
    install_activation_offload(plain)
    assert not plain._forward_hooks


@pytest.mark.slow
def test_compiled_layers_offload_too(monkeypatch):
    from kit.model import activation_offload, compile

    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    copies = []
    empty = activation_offload.empty_on_host
    monkeypatch.setattr(activation_offload, "empty_on_host", lambda tensor: copies.append(tensor) or empty(tensor))
    results = []
    for offloads in (False, True):
        model = model_of(offloads=offloads)
        layers = compile.CompiledLayers(model, ["LlamaDecoderLayer"])
        layers.is_on = True
        loss = passed(model)
        loss.sum().backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results)) and len(copies) == NUM_LAYERS
