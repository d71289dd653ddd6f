"""Any objective trains as exactly as the supervised loss: over the logits of each target."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data
from helpers import actual_strategy

from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import Collator
from kit.data.feed.feed import GlobalBatch
from kit.data.feed.ranks import Ranks
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.accelerator import Prepared
from kit.train.objective import OBJECTIVES, build_objective
from kit.train.step import train_step

PAIRS = [(3, 14), (15, 9), (26, 5), (35, 8)]  # samples: the better one, the worse one


def test_each_objective_that_can_be_chosen_is_registered_and_no_other():
    assert list(get_args(ObjectiveSettings.model_fields["objective"].annotation)) == list(OBJECTIVES)


def logits_of(model, micro_batch):
    """The logits that predict the targets, float32 [S, V], of those of all positions."""
    inputs = {"input_ids": micro_batch.input_ids, "attention_mask": micro_batch.attention_mask}
    return model(**inputs).logits.flatten(0, 1)[micro_batch.target_positions]


def penalised(logits, micro_batch):
    p = logits.softmax(dim=-1)
    return cross_entropy(logits, micro_batch) + 0.1 * (p * p.log()).sum(dim=-1)


def entropy_adaptive(logits, micro_batch):
    p = logits.detach().softmax(dim=-1).topk(20, dim=-1).values
    p /= p.sum(dim=-1, keepdim=True)
    entropy = -(p * p.log()).sum(dim=-1) / math.log(20)
    return cross_entropy(logits, micro_batch) * entropy**1.5


def smoothed_with_z_loss(logits, micro_batch):
    return smoothed(logits, micro_batch) + 1e-2 * logits.exp().sum(dim=-1).log() ** 2


def with_z_loss(logits, micro_batch):
    return cross_entropy(logits, micro_batch) + 1e-2 * logits.exp().sum(dim=-1).log() ** 2


def smoothed(logits, micro_batch):
    wanted = torch.full_like(logits, 0.2 / logits.shape[-1])
    wanted.scatter_add_(1, micro_batch.targets[:, None], torch.full((len(logits), 1), 0.8))
    return -(wanted * log_softmax(logits)).sum(dim=-1)


def dynamic(logits, micro_batch):
    losses = cross_entropy(logits, micro_batch)
    return losses * (-losses).exp().detach()


def log_softmax(logits):
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def cross_entropy(logits, micro_batch):
    return -log_softmax(logits).gather(1, micro_batch.targets[:, None])[:, 0]


def assert_step_is(expected_losses, recipe):
    """A step of ``recipe`` has the loss and the gradients of ``expected_losses(logits, micro_batch)``, float32 [S]."""
    samples = open_recipe_data(recipe, open_tokenizer(recipe), 320).train
    model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # else matrices A would get no gradient
            torch.nn.init.normal_(parameter, std=0.05)
    collator = Collator(2, 0, packing=False, max_length=512)
    micro_batches = [collator.collate(samples, [np.array([i]) for i in pair]) for pair in PAIRS]
    total, counts = sum(batch.weights.sum().item() for batch in micro_batches), np.ones(1, np.int64)
    expected = 0.0
    for micro_batch in micro_batches:
        loss = expected_losses(logits_of(model, micro_batch), micro_batch).sum() / total
        loss.backward()
        expected += loss.item()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theirs = {name: p.grad.clone() for name, p in trained.items()}
    model.zero_grad()
    ours = {}
    result = train_step(
        Prepared(
            Accelerator(cpu=True),
            Ranks(),
            model,
            torch.optim.SGD(trained.values(), lr=0.0),
            actual_strategy(sharded_layers=None),
        ),
        build_objective(recipe, ["a"]),
        GlobalBatch(micro_batches, np.array([total]), counts, counts, epoch=1.0, origins=[]),
        0.0,
        max_grad_norm=0,
        before_update=lambda: ours.update({name: p.grad.clone() for name, p in trained.items()}),
    )
    assert result.loss == pytest.approx(expected, rel=1e-6)
    scale = max(gradient.abs().max().item() for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-5, atol=1e-6 * scale), name


# Objectives over answers that are not the plain cross-entropy, and the class of each.
OTHERS = [
    ({"objective": "dft"}, dynamic, "DynamicFineTuning"),
    ({"label_smoothing_factor": 0.2}, smoothed, "SmoothedLoss"),
    ({"z_loss_coef": 1e-2}, with_z_loss, "ZLoss"),
    ({"z_loss_coef": 1e-2, "label_smoothing_factor": 0.2}, smoothed_with_z_loss, "ZLoss"),
    ({"objective": "eaft", "eaft_alpha": 1.5}, entropy_adaptive, "EntropyAdaptive"),
]


def test_losses_of_tokens_are_the_equations_on_full_logits(recipe):
    for method in ["full", "lora"]:
        for flags, losses, name in OTHERS:
            mine = recipe(method=method, **flags)
            assert type(build_objective(mine, ["a"])).__name__ == name, (method, flags, losses, name)
            assert_step_is(losses, mine)


@pytest.mark.slow
def test_evaluations_of_dft_and_smoothed_labels_are_the_cross_entropy(finetune, fp32):
    """``objective`` in a row says that its loss does not compare with eval_loss."""
    flags = {"config": fp32["single"], "max_steps": 2, "eval_split_size": 8, "eval_on_start": True}
    plain = finetune.ok("plain", **flags)
    assert not any("objective" in row for row in plain.rows)
    first = next(row["eval_loss"] for row in plain.rows if "eval_loss" in row)
    for own, _, name in OTHERS[:2]:
        run = finetune.ok(name, **flags, **own)
        assert next(row["eval_loss"] for row in run.rows if "eval_loss" in row) == first
        assert [row["objective"] for row in run.rows if "loss" in row] == [name] * 2
        assert run.losses[0] != plain.losses[0]
