"""One step is one gradient, however its samples are cut up or packed; none at all where something is not finite."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data
from helpers import actual_strategy
from transformers import MixtralConfig, MixtralForCausalLM

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator, MicroBatch
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.model.build import build_model, open_config
from kit.model.layers.loss_head import install_loss_head
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.strategy.accelerator import Prepared
from kit.system.errors import UserError
from kit.tasks.sft.loss import SupervisedLoss
from kit.train.optim.optim import build_optimizer
from kit.train.step import seed_everything, train_step

IDS = [3, 14, 15, 9, 26, 5, 35, 8]


@pytest.fixture(scope="module")
def setting(model_folder, chat_file):
    recipe = Recipe(model_name_or_path=str(model_folder), dataset=str(chat_file), max_length=256, method="full")
    samples = open_recipe_data(recipe, open_tokenizer(recipe), 320).train
    return recipe, samples


def prepared(model, optimizer, ranks=None):
    accelerator, strategy = Accelerator(cpu=True), actual_strategy(sharded_layers=None)
    return Prepared(accelerator, ranks or Ranks(), model, optimizer, strategy)


def batch_of(micro_batches, num_datasets=1):
    """The global batch of these micro-batches."""
    sums, counts = np.zeros(num_datasets), np.ones(num_datasets, np.int64)
    for each in micro_batches:
        np.add.at(sums, each.dataset_ids.numpy(), each.weights.numpy())
    return GlobalBatch(micro_batches, sums, num_targets=counts, num_tokens=counts, epoch=1.0, origins=[])


def build(recipe):
    torch.set_num_threads(1)
    return build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))


def step(setting, size, spoil=lambda model: None, max_grad_norm=1.0, weigh=lambda batch: batch, loss_scale=None):
    """Result, and the weights before and after a step on ``IDS`` in micro-batches of ``size`` samples."""
    recipe, samples = setting
    model = build(recipe)
    spoil(model)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    collator = Collator(8, 0, False, 512)
    rows = [[np.array([i]) for i in IDS[first : first + size]] for first in range(0, len(IDS), size)]
    batches = [weigh(collator.collate(samples, each)) for each in rows]
    num_datasets = 1 + max(int(batch.dataset_ids.max()) for batch in batches)
    objective = SupervisedLoss([f"dataset {i}" for i in range(num_datasets)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = batch_of(batches, num_datasets)
    scale = {"loss_scale": loss_scale}
    result = train_step(prepared(model, optimizer), objective, batch, 1e-3, max_grad_norm, **scale)
    assert result.objective == "SupervisedLoss"
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return result, before, after


@pytest.mark.slow
def test_weights_of_tokens_are_relative(setting):
    def double(batch):
        return replace(batch, weights=batch.weights * 2)

    def mute_odd(batch):
        return replace(batch, weights=batch.weights * torch.where(batch.targets % 2 == 1, 1e-9, 1.0))

    plain, _, after = step(setting, 8)
    doubled, _, doubled_after = step(setting, 8, weigh=double)
    assert doubled.loss == pytest.approx(plain.loss, rel=1e-6) and torch.allclose(after, doubled_after, atol=1e-8)
    muted, _, _ = step(setting, 8, weigh=mute_odd)
    assert abs(muted.loss - plain.loss) > 1e-3


@pytest.mark.slow
def test_each_data_set_has_its_own_loss(setting):
    def split(batch):
        return replace(batch, dataset_ids=(batch.target_positions % 3).clamp(max=1))

    plain, _, _ = step(setting, 2)
    parts, _, _ = step(setting, 2, weigh=split)
    assert parts.loss == pytest.approx(plain.loss, rel=1e-6) and len(parts.metrics) == 2
    assert min(parts.metrics.values()) < plain.loss < max(parts.metrics.values())
    empty, _, _ = step(setting, 2, weigh=lambda batch: replace(batch, dataset_ids=batch.dataset_ids + 1))
    assert empty.metrics == {"loss/dataset 1": pytest.approx(plain.loss, rel=1e-6)}  # dataset 0 had no target


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.01, 0])
def test_a_scale_of_the_loss_changes_no_bit_of_the_update(setting, max_grad_norm):
    plain, _, after = step(setting, 4, max_grad_norm=max_grad_norm)
    scaled, _, same = step(setting, 4, max_grad_norm=max_grad_norm, loss_scale=2.0**20)
    assert torch.equal(after, same) and (scaled.loss, scaled.grad_norm) == (plain.loss, plain.grad_norm)
    over, before, after = step(setting, 4, max_grad_norm=max_grad_norm, loss_scale=2.0**127)
    assert over.overflowed and not over.is_finite and over.loss == plain.loss and torch.equal(before, after)


@pytest.mark.slow
def test_the_update_is_clipped_to_the_norm_and_zero_does_not_clip(setting):
    result, before, after = step(setting, 4, max_grad_norm=0.01)
    assert result.grad_norm > 0.1 and (after - before).norm().item() == pytest.approx(0.01 * 1e-3, rel=1e-2)
    same, before, after = step(setting, 4, max_grad_norm=0)
    assert same.grad_norm == pytest.approx(result.grad_norm)
    assert (after - before).norm().item() == pytest.approx(same.grad_norm * 1e-3, rel=1e-2)


class Unused(torch.nn.Module):
    """A model of which a weight is not used, like one for images that gets text."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)])

    def forward(self, input_ids, **others):
        return self.layers[0](input_ids.float())[:, 0], None


def learn(model, ranks):
    """A step of ``model`` on one target."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    one = torch.ones(1, dtype=torch.int64)
    batch = MicroBatch(input_ids=one[None], target_positions=one, targets=one, weights=one.float(), dataset_ids=one * 0)
    for _ in range(2):
        train_step(prepared(model, optimizer, ranks), SupervisedLoss(["tiny"]), batch_of([batch]), 1.0, 1.0)


def test_a_weight_without_gradient_is_said_once_and_refused_where_others_would_wait(capsys):
    learn(Unused(), Ranks())
    said = capsys.readouterr().out
    assert said.count("no gradient reaches 1 of 2 trainable weights: layers.1.weight") == 1
    model = Unused()
    before = model.layers[0].weight.item()
    with pytest.raises(UserError, match=r"layers\.1\.weight.*\n.*add to --freeze: layers\.1\.\*"):
        learn(model, Ranks(0, 2))
    assert model.layers[0].weight.item() == before


def test_a_model_whose_loss_depends_on_no_trainable_weight_is_refused():
    model = Unused()
    model.layers[0].requires_grad_(False)
    with pytest.raises(UserError, match="the loss depends on no trainable weight"):
        learn(model, Ranks())


def test_a_run_in_which_no_weight_gets_a_gradient_ends_at_its_first_step():
    model = Unused()
    model.forward = lambda **_: (torch.ones(1, requires_grad=True), None)  # like layers that a compiler got wrong
    with pytest.raises(
        UserError, match=r"no gradient reaches 2 of 2 .* nothing would be learned\n.*--torch_compile false"
    ):
        learn(model, Ranks())


def test_the_routers_loss_is_minimised_and_reported():
    """The mean of the micro-batches' auxiliary losses, weighted by their targets, as the model itself has them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, num_hidden_layers=2, num_local_experts=4, **shape))
    ids = torch.randint(50, (3, 9))
    batches = []
    for row, (count, weight) in enumerate([(8, 1.0), (3, 2.0), (1, 1.0)]):
        positions = torch.arange(8 - count, 8)
        targets = ids[row, positions + 1]
        batches.append(
            MicroBatch(
                input_ids=ids[row][None],
                attention_mask=torch.ones(1, 9, dtype=torch.int64),
                target_positions=positions,
                targets=targets,
                weights=torch.full((count,), weight),
                dataset_ids=torch.zeros_like(targets),
            )
        )
    total, router_loss, expected = 15.0, 0.0, 0.0
    for batch in batches:
        outputs = model(batch.input_ids, output_router_logits=True, use_cache=False)
        log_p = outputs.logits[0, batch.target_positions].log_softmax(dim=-1)
        losses = -log_p.gather(1, batch.targets[:, None])[:, 0]
        part = 0.5 * outputs.aux_loss * batch.weights.sum() / total
        loss = (losses * batch.weights).sum() / total + part
        loss.backward()
        router_loss, expected = router_loss + part.item(), expected + loss.item()
    theirs = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    install_loss_head(model, router_aux_loss_coef=0.5)
    ours = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keep = lambda: ours.extend(p.grad.clone() for p in model.parameters())  # noqa: E731
    result = train_step(
        prepared(model, optimizer), SupervisedLoss(["a"]), batch_of(batches), 0.0, 0, before_update=keep
    )
    assert router_loss > 0.5
    assert result.metrics == {"router_loss": pytest.approx(router_loss, rel=1e-6)}
    assert result.loss == pytest.approx(expected, rel=1e-6)
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-7)


@pytest.fixture
def fused(setting):
    """A model, a fused optimiser that has made its state, and what does a step with them."""
    recipe, samples = setting
    model = build(recipe)
    optimizer = build_optimizer(model, recipe, 1e-3)
    batch = batch_of([Collator(8, 0, False, 512).collate(samples, [np.array([i]) for i in IDS[:2]])])

    def step(objective=SupervisedLoss):
        return train_step(prepared(model, optimizer), objective(["a"]), batch, 1e-3, 1.0)

    assert step().is_finite
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


class WithBadMetric(SupervisedLoss):
    """Its loss is finite, and one of its sums is not."""

    def terms(self, losses, micro_batch):
        terms, sums = super().terms(losses, micro_batch)
        return terms, torch.cat([sums, torch.tensor([torch.inf], dtype=torch.float64)])


@pytest.mark.parametrize("spoilt", ["weight", "metric"])
def test_a_fused_optimiser_skips_a_step_that_is_not_finite_and_keeps_every_bit(fused, spoilt):
    def bits():
        state = [tensor for of in fused.optimizer.state.values() for tensor in of.values()]
        return [tensor.detach().clone() for tensor in (*fused.model.parameters(), *state)]

    weight = fused.model.model.norm.weight.data
    kept, before = weight.clone(), bits()
    if spoilt == "weight":
        weight[0] = torch.nan
    result = fused.step(WithBadMetric if spoilt == "metric" else SupervisedLoss)
    weight.copy_(kept)
    assert not result.is_finite and all(map(torch.equal, bits(), before))
    assert fused.step().is_finite
    steps = {of["step"].item() for of in fused.optimizer.state.values()}
    assert steps == {2.0} and not any(map(torch.equal, bits(), before))


def test_generators_are_a_function_of_seed_step_and_rank():
    def draw(*key):
        seed_everything(*key)
        return torch.rand(4).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({tuple(draw(*key)) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)]}) == 5
