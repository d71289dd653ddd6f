"""A model and its optimiser, as a run has them."""

import pytest
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from memory_helpers import make

from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.train.optim import build_optimizer


@pytest.fixture(scope="module")
def build(model_folder):
    Accelerator(cpu=True)  # its optimiser asks for one

    def build(method="full", optim="adamw_torch", compute_dtype="float32", **changes):
        recipe = make(model_name_or_path=str(model_folder), method=method, optim=optim, **changes)
        model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype=compute_dtype, device="cpu"))
        return model, AcceleratedOptimizer(build_optimizer(model, recipe))

    return build
