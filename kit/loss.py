"""Summed token loss from hidden states, without full logits.

The loss is computed inside the model's forward, at the one place where every strategy has the head's weights
gathered: inside the head. Only positions that predict a supervised token get logits, a chunk at a time, recomputed
in the backward pass.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Positions per chunk. Logits of one chunk: chunk x vocabulary x (2 + 4 + 4) bytes.
CHUNK_TOKENS = 2048


def install_loss_head(model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Teach a causal LM to return its summed loss. Call before wrapping; plain calls go on as before.

    Afterwards ``model(input_ids, attention_mask, target_positions=P, targets=Y)`` returns the cross-entropy in nats
    summed over the S targets, float32, shape []. P [S] holds flat positions ``b * T + t``, Y [S] the ids they predict.
    """
    head = model.get_output_embeddings()
    plain_model_forward, plain_head_forward = model.forward, head.forward
    transform = _logit_transform(model.config.get_text_config())

    def chunk_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = transform(plain_head_forward(hidden).float())
        return F.cross_entropy(logits, targets, reduction="sum")

    def head_forward(self: Any, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return plain_head_forward(hidden)
        # The empty sum keeps the graph, so that a rank without targets still takes part in the backward pass.
        total = hidden.float().sum() * 0.0
        for chunk, chunk_targets in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(chunk_loss, chunk, chunk_targets, use_reentrant=False)
            else:
                total = total + chunk_loss(chunk, chunk_targets)
        return total

    def model_forward(self: Any, *args: Any, targets: Any = None, target_positions: Any = None, **kwargs: Any) -> Any:
        if targets is None:
            return plain_model_forward(*args, **kwargs)
        for name in ("labels", "logits_to_keep", "return_dict"):  # adapters pass these on
            kwargs.pop(name, None)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        hidden = getattr(self, self.base_model_prefix)(*args, use_cache=False, **kwargs).last_hidden_state
        # [B, T, h] -> [S, h]: only positions that predict a supervised token.
        return self.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, target_positions), targets=targets)

    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(model_forward, model)


def _logit_transform(config: Any) -> Any:
    """What some families do to logits after the head: cap (Gemma), multiply (Cohere), divide (Granite)."""
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    factor *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    return (lambda logits: logits * factor) if factor != 1.0 else (lambda logits: logits)
