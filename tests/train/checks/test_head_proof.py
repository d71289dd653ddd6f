"""A loss head that gives other losses than the model's own logits is found before the first step, and not used."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import VOCABULARY, tiny_config
from kit.data.feed.data_ranks import Ranks
from kit.model.layers import loss_head
from kit.strategy.accelerator import Prepared
from kit.train.checks.head_proof import prove_head

# What a forward may do to its logits, and one of each that does it.
FAMILIES = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "mixtral": {},  # experts
    "phi": {},  # a bias
}
WRONG = {
    "nothing": lambda logits: logits,
    "a cap": lambda logits: torch.tanh(logits / 30.0) * 30.0,
    "another cap": lambda logits: torch.tanh(logits / 50.0) * 50.0,
    "a factor": lambda logits: logits * 4.0,
    "a little": lambda logits: logits * 0.95,
}


def prepared(family, dtype, monkeypatch, transform=None, **changes):
    """A model with a loss head that applies ``transform`` instead of what the model's code says."""
    torch.manual_seed(0)
    config = tiny_config(family)
    for name, value in (FAMILIES.get(family, {}) | changes).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if transform:
        monkeypatch.setattr(loss_head, "_logit_transform", lambda model: transform)
    loss_head.install_loss_head(model.train())
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == torch.bfloat16 else "no")
    return Prepared(accelerator, Ranks(), accelerator.prepare_model(model), None, None)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield request.param
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_does_to_its_logits_is_proven_and_leaves_no_trace(family, dtype, monkeypatch):
    this = prepared(family, dtype, monkeypatch)
    tensors = {name: tensor.clone() for name, tensor in this.model.state_dict().items()}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert prove_head(this, VOCABULARY) == []
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert not this.model.uses_own_logits and this.model.training
    assert all(torch.equal(tensors[name], tensor) for name, tensor in this.model.state_dict().items())
    assert not this.model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("llama", "a cap"),
        ("llama", "a factor"),
        ("llama", "a little"),
        ("gemma2", "nothing"),
        ("gemma2", "another cap"),
        ("granite", "nothing"),
    ],
)
def test_a_wrong_transform_is_found_and_the_models_own_logits_are_used(family, wrong, dtype, monkeypatch):
    this = prepared(family, dtype, monkeypatch, WRONG[wrong])
    (line,) = prove_head(this, VOCABULARY)
    assert "note: the model computes its own logits" in line
    ids = torch.randint(3, 100, (1, 12))
    with torch.no_grad():
        own = this.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = this.model(input_ids=ids, target_positions=torch.arange(11), targets=ids[0, 1:])
    assert torch.allclose(losses, F.cross_entropy(own, ids[0, 1:], reduction="none"), atol=1e-6)


def test_whatever_comes_between_decoder_and_head_is_found(monkeypatch):
    """A forward that only looks like a known one: its head is given something else than the decoder's output."""

    class Doubling(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden * 2.0 if hidden.dim() == 3 else hidden)

    this = prepared("llama", torch.float32, monkeypatch)
    plain = this.model.get_output_embeddings()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.lm_head = Doubling(plain.in_features, plain.out_features, bias=False)
    loss_head.install_loss_head(model)
    assert prove_head(Prepared(this.accelerator, Ranks(), model, None, None), VOCABULARY)


def test_a_model_whose_forward_is_unknown_uses_its_own_logits_without_a_proof(monkeypatch):
    this = prepared("minicpm3", torch.float32, monkeypatch)
    assert this.model.uses_own_logits
    monkeypatch.setattr(this.model, "forward", None)  # is not called
    assert prove_head(this, VOCABULARY) == []
