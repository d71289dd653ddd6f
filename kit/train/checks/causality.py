"""Check on the prepared model, before the first step, that a multimodal one can be trained on text."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.model.pretrained.classes import whole_class
from kit.system.errors import UserError, first_line
from kit.train.checks.rows import Rows, evaluating

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

_TOKENS = 16


def check_causality(prepared: "Prepared", vocab_size: int) -> None:
    """Raise ``UserError`` if a multimodal model needs images or audio, or its tokens attend to later ones.

    Called by all ranks. Other models are known by their config: ``kit.model.build``.

    Args:
        vocab_size: rows of the model's embedding.
    """
    accelerator, model = prepared.accelerator, prepared.model
    plain: Any = accelerator.unwrap_model(model)
    base = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    if whole_class(base.config) is None:
        return
    first, second, other = np.random.default_rng(0).integers(vocab_size, size=(3, _TOKENS))
    weights = np.repeat([1, 0], _TOKENS)  # losses of the first half
    rows = Rows([(np.concatenate([first, each]), weights) for each in (second, other)])
    problem = f"{type(base).__name__} "
    try:
        with evaluating(model), torch.no_grad():
            of_second, of_other = (
                model(**rows.micro_batch([i]).to(accelerator.device).model_inputs()) for i in range(2)
            )
        difference = (of_second - of_other).abs().max()
        # Equal shapes give equal bits, except for experts, whose inputs depend on the routing.
        sees = (difference > (1e-5 if prepared.computes_in_float32 else 2e-2)).float()
        if not prepared.ranks.sum(sees).item():
            return
        problem += f"lets tokens attend to later ones (losses differ by {difference.item():.2g})"
    except Exception as error:  # the code of any family
        problem += f"fails on a text alone ({first_line(error)})"
    raise UserError("model_name_or_path", problem, "a causal model that reads text alone too")
