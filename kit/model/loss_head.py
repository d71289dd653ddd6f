"""The loss of each supervised token from hidden states, without full logits.

The loss is computed inside the model's forward, at the one point where every strategy has the head's weights
gathered: inside the head. Only positions that predict a supervised token get logits, a chunk at a time, recomputed
in the backward pass. A family whose forward does anything unknown between decoder and logits keeps its own, full
logits: slower, never wrong.
"""

import inspect
import re
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kit.model.attention import VARLEN

# Where packed samples begin and end; only variable-length attention asks, others read position_ids.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Positions per chunk. Logits of one chunk: chunk x vocabulary x (2 + 4 + 4) bytes.
CHUNK_TOKENS = 2048


def install_loss_head(model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Teach a causal LM to return the loss of each target. Call before wrapping; plain calls go on as before.

    Afterwards ``model(input_ids, ..., target_positions=P, targets=Y)`` returns the cross-entropy in nats of each of
    the S targets, float32 [S]. P [S] holds flat positions ``b * T + t``, Y [S] the ids they predict.
    """
    head = model.get_output_embeddings()
    plain_model_forward, plain_head_forward = model.forward, head.forward
    transform = _logit_transform(model.config.get_text_config())
    head_is_known = _head_is_known(model)

    def chunk_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = transform(plain_head_forward(hidden).float())
        return F.cross_entropy(logits, targets, reduction="none")

    def head_forward(self: Any, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return plain_head_forward(hidden)
        losses = []  # without targets: one empty chunk, so that the rank still takes part in the backward pass
        for chunk, chunk_targets in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                losses.append(checkpoint(chunk_loss, chunk, chunk_targets, use_reentrant=False))
            else:
                losses.append(chunk_loss(chunk, chunk_targets))
        return torch.cat(losses)

    def model_forward(self: Any, *args: Any, targets: Any = None, target_positions: Any = None, **kwargs: Any) -> Any:
        if targets is None:
            return plain_model_forward(*args, **kwargs)
        for name in ("labels", "logits_to_keep", "return_dict"):  # adapters pass these on
            kwargs.pop(name, None)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if self.config._attn_implementation != VARLEN:
            kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDS}
        if not head_is_known:
            logits = plain_model_forward(*args, use_cache=False, **kwargs).logits.flatten(0, 1)  # [B * T, V]
            chosen = logits.index_select(0, target_positions).float()
            return F.cross_entropy(chosen, targets, reduction="none")
        hidden = getattr(self, self.base_model_prefix)(*args, use_cache=False, **kwargs).last_hidden_state
        # [B, T, h] -> [S, h]: only positions that predict a supervised token.
        return self.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, target_positions), targets=targets)

    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(model_forward, model)


# What may stand on the right of `logits =` and `hidden_states =` in a forward that the head above reproduces.
_KNOWN_LOGITS = re.compile(
    r"""self\.\w+\(hidden_states(\[:,\ slice_indices,\ :\])?(\.to\([\w.=]+\))?\)(\.float\(\)|\.contiguous\(\))?$
    |self\.lm_head\(hidden_states\)\ \*\ self\.(config\.logits_scaling|model\.lm_head_multiplier)$
    |logits(\.float\(\))?\ [*/]\ self\.(config\.final_logit_softcapping|config\.logits_scaling|logit_scale)$
    |torch\.tanh\(logits\)$|nn\.functional\.tanh\(logits\ /\ cap\)\ \*\ cap$|logits,""",
    re.VERBOSE,
)
_KNOWN_HIDDEN = re.compile(
    r"slice_logits_to_keep\(hidden_states, logits_to_keep\)$"
    r"|\w*outputs(\.last_hidden_state|\[0\])$|\w*outputs\.hidden_states,"
)


def _head_is_known(model: Any) -> bool:
    """Whether the family's own forward is decoder, head and a known transform; read from its source."""
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    logits, hidden = (
        [line.split("#")[0].strip() for line in re.findall(rf"^\s*{name}\s*=(?!=)\s*(.+)$", source, re.MULTILINE)]
        for name in ("logits", "hidden_states")
    )
    return bool(logits) and all(map(_KNOWN_LOGITS.match, logits)) and all(map(_KNOWN_HIDDEN.match, hidden))


def _logit_transform(config: Any) -> Any:
    """What some families do to logits after the head: cap (Gemma), multiply (Cohere), divide (Granite)."""
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    factor *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    return (lambda logits: logits * factor) if factor != 1.0 else (lambda logits: logits)
