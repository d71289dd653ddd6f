"""Layers' inputs that wait in host memory give every bit, and nothing is released before its copy is done."""

import weakref

import pytest
import torch
from model_helpers import BF16, FP32, build

from kit.config.recipe import Recipe

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
