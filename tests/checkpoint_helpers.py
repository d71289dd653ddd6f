"""Small models on one process, trained a few steps, saved and compared bit for bit."""

from types import SimpleNamespace

import torch

from kit.checkpoint.manifest import list_checkpoints
from kit.checkpoint.save import Saver
from kit.config.recipe import Recipe
from kit.config.settings.output import OutputSettings
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.train.optim.optim import build_optimizer

torch.set_num_threads(1)  # for models so small, more of them only wait for each other
ALONE = SimpleNamespace(process_index=0, num_processes=1)  # an Accelerator of one process
ABOUT = {"identity": {"seed": 1}, "strategy": {"type": "single"}, "versions": {}}


def build(folder, **settings):
    recipe = Recipe(model_name_or_path=str(folder), dataset="x.jsonl", learning_rate=1e-2, **settings)
    trained_dtype = "bfloat16" if recipe.optim == "adamw_bf16" else "float32"
    plan = LoadPlan(compute_dtype="float32", trained_dtype=trained_dtype, device="cpu")
    model = build_model(recipe, open_config(recipe), plan, seed=recipe.seed)
    return model, build_optimizer(model, recipe, recipe.peak_learning_rate)


def saver_of(folder, **settings):
    return Saver(ALONE, OutputSettings(**settings), folder, ABOUT, timeout_seconds=1800)


def save_checkpoint(model, optimizer, folder, state, limit=2, best_step=None, **settings):
    """``best_step``: of the lowest loss so far, to be kept."""
    one = saver_of(folder, save_total_limit=limit, keep_best=best_step is not None, **settings)
    one.save(model, optimizer, {**state, "best": {"step": best_step}})
    one.wait()
    return folder / f"step-{state['step']:08d}"


def train(model, optimizer, steps):
    """Returns the losses, as bits."""
    losses = []
    for step in steps:
        ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(step))
        wanted = {"target_positions": torch.arange(8), "targets": ids[0, 1:]}
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), **wanted).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def same(one, other):
    """Bit for bit, through any nesting."""
    if isinstance(one, torch.Tensor):
        # As bytes: 4-bit weights stored as floats may spell a NaN.
        bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def steps(folder):
    return [path.name for path in list_checkpoints(folder)]
