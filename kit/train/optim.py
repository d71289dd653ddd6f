"""Build the optimiser for the trainable weights."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


def build_optimizer(model: torch.nn.Module, recipe: "Recipe") -> torch.optim.Optimizer:
    """Build AdamW for the trainable weights. Weights of one dimension (norms, biases) get no weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas, epsilon = (recipe.adam_beta1, recipe.adam_beta2), recipe.adam_epsilon
    if recipe.optim.startswith("adamw_torch"):
        fused = recipe.optim == "adamw_torch_fused"
        return torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, betas=betas, eps=epsilon, fused=fused)
    import bitsandbytes.optim

    paged = recipe.optim.startswith("paged")
    return bitsandbytes.optim.AdamW8bit(groups, lr=recipe.peak_learning_rate, betas=betas, eps=epsilon, is_paged=paged)
