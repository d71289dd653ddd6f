"""One step is one gradient, however its samples are cut up, and no step at all when something is not finite."""

import pytest
import torch
from accelerate import Accelerator

from kit.config import LoadPlan, Recipe
from kit.data import collate, open_data, open_sources
from kit.errors import TrainingError
from kit.model import build_model, open_config, open_tokenizer
from kit.step import seed_everything, train_step

IDS = [3, 14, 15, 9, 26, 5, 35, 8]


@pytest.fixture(scope="module")
def setting(model_folder, chat_file):
    recipe = Recipe(model_name_or_path=str(model_folder), dataset=str(chat_file), max_length=256, method="full")
    samples = open_data(recipe, open_sources(recipe), open_tokenizer(recipe), 320).train
    return recipe, samples


def step(setting, size, spoil=lambda model: None, max_grad_norm=1.0, rate=1e-3):
    """Loss, norm, and the weights before and after a step on ``IDS`` in micro-batches of ``size``."""
    recipe, samples = setting
    torch.set_num_threads(1)
    model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    spoil(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    batches = [collate(samples, IDS[i : i + size], 0) for i in range(0, len(IDS), size)]
    num_targets = int(samples.num_supervised[IDS].sum())
    try:
        result = train_step(Accelerator(cpu=True), model, optimizer, batches, num_targets, rate, max_grad_norm)
    except TrainingError as error:
        result = error
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return result, before, after


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_gradient_does_not_depend_on_the_micro_batches(setting, size):
    (loss, norm), before, after = step(setting, 1, rate=1.0)
    (other_loss, other_norm), _, other_after = step(setting, size, rate=1.0)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_norm == pytest.approx(norm, rel=5e-6)
    assert torch.allclose(other_after - before, after - before, rtol=1e-4, atol=1e-7)


def test_the_update_is_clipped_to_the_norm_and_zero_does_not_clip(setting):
    (_, norm), before, after = step(setting, 4, max_grad_norm=0.01)
    assert norm > 0.1 and (after - before).norm().item() == pytest.approx(0.01 * 1e-3, rel=1e-2)
    (_, same), before, after = step(setting, 4, max_grad_norm=0)
    assert same == pytest.approx(norm) and (after - before).norm().item() == pytest.approx(norm * 1e-3, rel=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(setting, value):
    def spoil(model):
        model.model.norm.weight.data[0] = value

    error, before, after = step(setting, 4, spoil)
    assert isinstance(error, TrainingError) and "loss" in str(error)
    assert torch.equal(torch.nan_to_num(before), torch.nan_to_num(after))


def test_generators_are_a_function_of_seed_step_and_rank():
    def draw(*key):
        seed_everything(*key)
        return torch.rand(4).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({tuple(draw(*key)) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)]}) == 5
