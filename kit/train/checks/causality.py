"""Check on the prepared model, before the first step, that a multimodal one can be trained on text."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.feed.batches import MicroBatch
from kit.model.pretrained.classes import whole_class
from kit.strategy.weights import reshard
from kit.system.errors import UserError, first_line

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
    first, second, other = np.random.default_rng(0).integers(vocab_size, size=(3, 1, _TOKENS))
    positions = torch.arange(_TOKENS - 1)

    def losses(*halves: np.ndarray) -> torch.Tensor:
        """Those of the first half."""
        batch = MicroBatch(
            input_ids=torch.from_numpy(np.concatenate(halves, axis=1)),
            target_positions=positions,
            targets=torch.from_numpy(first[0, 1:]),
            weights=torch.ones(len(positions)),
            dataset_ids=torch.zeros_like(positions),
            attention_mask=torch.ones(1, 2 * _TOKENS, dtype=torch.int64),
        )
        found: torch.Tensor = model(**batch.to(accelerator.device).model_inputs())
        return found

    was_training = model.training
    model.eval()
    problem = f"{type(base).__name__} "
    try:
        with torch.no_grad():
            difference = (losses(first, second) - losses(first, other)).abs().max()
        # Equal shapes give equal bits, except for experts, whose inputs depend on the routing.
        sees = (difference > (1e-5 if prepared.computes_in_float32 else 2e-2)).float()
        if not prepared.ranks.sum(sees).item():
            return
        problem += f"lets tokens attend to later ones (losses differ by {difference.item():.2g})"
    except Exception as error:  # the code of any family
        problem += f"fails on a text alone ({first_line(error)})"
    finally:
        model.train(was_training)
        reshard(model)
    raise UserError("model_name_or_path", problem, "a causal model that reads text alone too")
