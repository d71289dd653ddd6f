"""Build the optimiser for the trainable weights."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kit.config.settings.optimisation import OptimSettings


def build_optimizer(
    model: torch.nn.Module, settings: "OptimSettings", peak_learning_rate: float
) -> torch.optim.Optimizer:
    """Build AdamW for the trainable weights. Weights of one dimension (norms, biases) get no weight decay.

    Args:
        peak_learning_rate: ``train_step`` replaces it in each step by the rate of that step.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.adam_beta1, settings.adam_beta2)
    epsilon = settings.adam_epsilon
    if settings.optim.startswith("adamw_torch"):
        fused = settings.optim == "adamw_torch_fused"
        return torch.optim.AdamW(groups, lr=peak_learning_rate, betas=betas, eps=epsilon, fused=fused)
    import bitsandbytes.optim

    paged = settings.optim.startswith("paged")
    return bitsandbytes.optim.AdamW8bit(groups, lr=peak_learning_rate, betas=betas, eps=epsilon, is_paged=paged)
