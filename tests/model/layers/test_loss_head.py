"""The loss head gives the loss and gradients that the model's own logits give, without holding them all."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.tiny_families import VOCABULARY, tiny_config
from kit.model.layers import loss_head
from kit.model.layers.loss_head import install_loss_head
from kit.model.pretrained.classes import auto_class
from kit.system.errors import UserError

torch.set_num_threads(1)  # for models so small, more of them only wait for each other


def tiny(family="llama", **changes):
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(3)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that each of them counts
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batch(supervised=((0, 3, 12), (1, 3, 7))):
    """Three padded rows; ``supervised`` has rows, with the first token that is learned and that behind the last."""
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 9:] = 0
    ids *= mask
    places = [row * 12 + place for row, first, end in supervised for place in range(first, end)]
    places = torch.tensor(places, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": mask}, {
        "target_positions": places - 1,
        "targets": ids.flatten()[places],
    }


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert set(ours) == set(theirs) and theirs
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        difference = float((ours[name] - gradient).abs().max())
        assert difference <= 1e-5 * max(float(gradient.abs().max()), 0.01 * scale), name


# Keys with which some families cap, multiply or divide their logits, and the values that they have here in all of them.
KEYS = {
    "final_logit_softcapping": 0.2,
    "logits_soft_cap": 0.4,
    "logits_scaling": 3.0,
    "logit_scale": 0.7,
    "lm_head_multiplier": 5.0,
    "output_logit_soft_cap": 0.1,
}
IGNORE_ALL = (
    "llama mistral qwen2 qwen3 mixtral llama4_text phi olmo2 stablelm starcoder2 gemma glm opt gpt2 gpt_neox mpt bloom "
    "minicpm3"
).split()
USE_ONE = "gemma2 gemma4 nanochat cohere granite hyperclovax falcon_h1 recurrent_gemma".split()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*IGNORE_ALL, *USE_ONE])
def test_it_is_the_loss_of_the_models_own_logits_which_use_a_key_of_the_config_or_not(family):
    keys = KEYS | ({"logit_scale": "inv_sqrt_d_model"} if family == "mpt" else {})
    reference = tiny(family, **keys if family != "minicpm3" else {"dim_model_base": 8})
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(20.0)  # so that a cap and a factor show
    model = deepcopy(reference)
    install_loss_head(model)
    assert model.uses_own_logits == (family == "minicpm3")  # whose forward is not known: slower, and as right
    inputs, wanted = batch()
    logits = reference(**inputs, use_cache=False).logits.float().flatten(0, 1)
    expected = F.cross_entropy(logits[wanted["target_positions"]], wanted["targets"], reduction="none")
    share = torch.linspace(0.5, 2, len(expected))  # a sum that no token could be left out of
    (expected * share).sum().backward()
    loss = model(**inputs, **wanted)
    (loss * share).sum().backward()
    assert loss.shape == wanted["targets"].shape and loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_load_balancing_loss_is_returned_with_the_losses_that_are_log_probabilities(recomputed):
    """The family's own loss: a mean over targets, and the coefficient times the auxiliary loss."""
    reference = tiny("mixtral", router_aux_loss_coef=0.5)
    model = deepcopy(reference)
    install_loss_head(model, router_aux_loss_coef=0.5)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs, wanted = batch()
    labels = torch.full_like(inputs["input_ids"], -100)
    labels.view(-1)[wanted["target_positions"] + 1] = wanted["targets"]
    expected = reference(**inputs, labels=labels, use_cache=False)
    expected.loss.backward()
    assert expected.aux_loss > 1  # else the coefficient would not show
    losses, router_loss = model(**inputs, **wanted, with_router_loss=True)
    (losses.mean() + router_loss).backward()
    assert torch.allclose(router_loss, 0.5 * expected.aux_loss, rtol=1e-6)
    logits = expected.logits.flatten(0, 1)[wanted["target_positions"]]
    own = logits.log_softmax(-1).gather(1, wanted["targets"][:, None])[:, 0]
    assert torch.allclose(-losses, own, rtol=1e-5)
    assert torch.allclose(losses.mean() + router_loss, expected.loss, rtol=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), name
    with torch.no_grad():  # an evaluation asks for the losses alone
        assert torch.allclose(model(**inputs, **wanted), losses, rtol=1e-5)


def test_the_auxiliary_loss_leaves_out_the_padding_of_packs():
    model = tiny("mixtral", router_aux_loss_coef=0.5)
    install_loss_head(model, router_aux_loss_coef=0.5)
    ids = torch.arange(3, 15)[None]
    padding = torch.zeros(1, 8, dtype=torch.int64)
    wanted = {"target_positions": torch.arange(5), "targets": ids[0, 1:6]}

    def loss(num_padding):
        tokens = torch.cat([ids, padding[:, :num_padding]], dim=1)
        mask = torch.cat([torch.ones_like(ids), padding[:, :num_padding]], dim=1)
        positions = torch.cat([torch.arange(12), torch.arange(num_padding)])[None]
        inputs = {"input_ids": tokens, "position_ids": positions, "token_mask": mask}
        return sum(part.mean() for part in model(**inputs, **wanted, with_router_loss=True))

    assert torch.allclose(loss(8), loss(0), atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_many_chunks_round_the_gradient_of_a_trained_head_no_more_than_one(autocast):
    """In bf16, of weights that FSDP2 has gathered, and of float32 weights that autocast casts."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 64), 0.1 * torch.randn(VOCABULARY, 64)
    hidden, weight, targets = hidden.bfloat16(), weight.bfloat16(), torch.randint(VOCABULARY, (1024,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, targets).backward()

    def error(chunk_tokens):
        model = tiny(tie_word_embeddings=False, hidden_size=64)
        model.lm_head.weight = torch.nn.Parameter(weight.float() if autocast else weight.clone())
        install_loss_head(model, chunk_tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            losses = model.lm_head(hidden, targets=targets)
        losses.mean().backward()
        found = model.lm_head.weight.grad.double()
        return float((found - exact.grad).norm() / exact.grad.norm())

    one = error(1024)
    assert one < 3e-3 and error(8) < 1.6 * one  # added up in bf16, the error is seven times that of one chunk


def test_a_batch_without_targets_gives_zero_and_zero_gradients_for_every_weight():
    """A rank that got no sample must still take part in the backward pass, with nothing to add."""
    model = tiny()
    install_loss_head(model)
    inputs, wanted = batch(())
    loss = model(**inputs, **wanted)
    loss.sum().backward()
    assert loss.shape == (0,)
    assert len(gradients(model)) == len(list(model.parameters()))
    assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())


def test_never_more_logits_than_one_chunk_and_none_for_unsupervised_tokens(monkeypatch):
    rows = []
    linear = F.linear

    def counting(input, weight, bias=None):
        if weight.shape[0] == VOCABULARY:
            rows.append(input.shape[:-1].numel())
        return linear(input, weight, bias)

    monkeypatch.setattr(F, "linear", counting)
    model = tiny()
    install_loss_head(model, 4)
    inputs, wanted = batch()
    loss = model(**inputs, **wanted)
    assert rows == [4, 4, 4, 1]  # 13 targets among 36 tokens
    loss.sum().backward()
    assert sorted(rows) == sorted([4, 4, 4, 1] * 2)  # computed again, not kept


def smoothed_and_entropy(targets, logits, rows):
    """Two values of each target: its label-smoothed loss, and the entropy of what the model expects there."""
    smoothed = F.cross_entropy(logits, targets[rows], reduction="none", label_smoothing=0.2)
    log_p = logits.log_softmax(dim=-1)
    return torch.stack([smoothed, -(log_p.exp() * log_p).sum(dim=-1)], dim=1)


def with_head(family, trains, chunk_tokens=5):
    """A model with an untied head, and one that computes full logits."""
    reference = tiny(family, tie_word_embeddings=False)
    reference.get_output_embeddings().requires_grad_(trains)
    model = deepcopy(reference)
    install_loss_head(model, chunk_tokens)
    return model, reference


@pytest.mark.parametrize(
    ("known", "trains", "chunk_tokens"),
    [(True, True, 1), (True, True, 10_000), (True, False, 5), (False, True, 5), (False, False, 10_000)],
)
def test_values_of_the_logits_are_those_of_full_logits(monkeypatch, chunk_tokens, trains, known):
    if not known:  # a model class whose forward does something else
        monkeypatch.setattr(loss_head, "_logit_transform", lambda model: None)
    model, reference = with_head("gemma2", trains, chunk_tokens)
    inputs, wanted = batch()
    logits = reference(**inputs, use_cache=False).logits.float().flatten(0, 1)[wanted["target_positions"]]
    expected = smoothed_and_entropy(wanted["targets"], logits, slice(None))
    share = torch.linspace(0.5, 2, expected.numel()).reshape(expected.shape)
    (expected * share).sum().backward()
    options = {"target_values": partial(smoothed_and_entropy, wanted["targets"])}
    values = model(**inputs, **wanted, **options)
    (values * share).sum().backward()
    assert values.shape == (13, 2) and torch.allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(reference))
    assert ("lm_head.weight" in gradients(model)) == trains
    with torch.no_grad():
        assert torch.allclose(model(**inputs, **wanted, **options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known", [True, False])
def test_values_that_cannot_be_trained_on_are_refused(monkeypatch, known):
    if not known:
        monkeypatch.setattr(loss_head, "_logit_transform", lambda model: None)
    model, _ = with_head("llama", trains=False)
    inputs, wanted = batch([(0, 7, 12)])
    for values_of, found in (
        (lambda logits, rows: logits.sum(), r"shape \[\] for 5 targets"),
        (lambda logits, rows: logits[:, None], r"shape \[5, 1, 160\] for 5 targets"),
        (lambda logits, rows: logits.detach().sum(dim=-1), "values without a gradient"),
    ):
        with pytest.raises(UserError, match=rf"objective: target_values returned {found}[\s\S]*\[C\] or \[C, K\]"):
            model(**inputs, **wanted, target_values=values_of)
