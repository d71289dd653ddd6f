"""Packed variable-length attention, registered with transformers under the name ``VARLEN``.

A packed call gives, beside ``input_ids`` [B, T] of which each row is one pack: ``position_ids`` [B, T] that start at 0
with every sample, ``attention_mask=None``, ``use_cache=False``, ``cu_seq_lens_q`` int32 [n + 1], the borders of the
samples in the B * T tokens, and ``max_length_q``, tokens of the longest or more. The padding of a row is a sample of
its own, for the borders must cover every token.

Promises:

- In a packed call a token sees its own sample up to itself, and a mask [B, 1, T, T] is never built.
- Any other call is sdpa's, mask included: padded batches, generation with a cache, packs known by positions alone.
- A call that is neither is refused, and so is every option of attention that a packed call would ignore.
- A model whose attention does not come here stops at the mask, which is no tensor; it never runs without one.
- On a CPU, in float32, and on GPUs before Ampere the same result comes from a loop over the samples.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# transformers checks names that contain "sdpa" as it does sdpa, so that a family that cannot take it is refused.
VARLEN = "sdpa_varlen"
# What reaches an attention function in a packed call and asks nothing of it.
_OF_NO_CONCERN = {"position_ids", "cu_seq_lens_k", "max_length_k"}


def register() -> None:
    """Make ``attn_implementation=VARLEN`` known to transformers, for models built from now on."""
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, LazyMask)


def unfit(config: Any) -> str:
    """Why a model of this ``config`` cannot take packed variable-length attention; an empty string if it can."""
    if config.get_text_config() is not config:
        return "a model of more than text"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "attention to later tokens"
    layer_types = getattr(config, "layer_types", None)
    for other in sorted(set(layer_types or ()) - {"full_attention"}):
        return f"layers of {other}"
    # A family that lists its layers asks the list, not the number, which may be there and in no use.
    if not layer_types and getattr(config, "sliding_window", None):
        return f"a sliding window of {config.sliding_window} tokens"
    if not layer_types and getattr(config, "attention_chunk_size", None):
        return f"attention in chunks of {config.attention_chunk_size} tokens"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention scores with a soft cap"
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, 0.0):
            return f"{name} {getattr(config, name)}"
    if getattr(config, "v_head_dim", None):
        return "value heads of another size than query heads"
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        return "no attention heads"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if head_size % 8 or head_size > 256:
        return f"attention heads of {head_size}: not a multiple of 8 up to 256"
    return ""


class LazyMask:
    """sdpa's mask of one forward pass, built once, when a layer asks for it.

    In a packed call none does; the code in which transformers builds masks is not told whether a call is packed.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self.is_given = arguments["attention_mask"] is not None

    @cached_property
    def dense(self) -> torch.Tensor | None:
        """[B, 1, T, T], true where a token sees another; None if it sees all before it."""
        return sdpa_mask(**self._arguments)

    def contiguous(self) -> torch.Tensor | None:
        """What generation asks of a mask that it prepares outside the model, for a static cache."""
        return self.dense


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of ``VARLEN``.

    Args:
        query: [B, H, T, D]; key and value have as many heads or fewer.
        cu_seq_lens_q: int32 [n + 1], 0 to B * T; with it the call is packed. Keys have the same borders.
        max_length_q: tokens of the longest sample, or more.

    Returns:
        [B, T, H, D], and no attention weights.

    Raises:
        ValueError: a packed call with a mask, with tokens of a cache, or with what varies from plain causal attention.
    """
    if cu_seq_lens_q is None:
        mask = attention_mask.dense if isinstance(attention_mask, LazyMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"past_key_values: {key.shape[2] - query.shape[2]} earlier tokens in a packed call")
    if attention_mask.is_given if isinstance(attention_mask, LazyMask) else attention_mask is not None:
        raise ValueError("attention_mask: given to a packed call; expected None, the samples are told by cu_seq_lens_q")
    if cu_seq_lens_q.dtype != torch.int32 or max_length_q is None:
        found = f"{cu_seq_lens_q.dtype} and {max_length_q}"
        raise ValueError(f"cu_seq_lens_q and max_length_q: {found}; expected torch.int32 and a number of tokens")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("is_causal: false in a packed call")
    options = {"dropout": dropout, **{name: kwargs[name] for name in kwargs.keys() - _OF_NO_CONCERN}}
    for name, option in sorted(options.items()):
        if isinstance(option, torch.Tensor) or option:
            raise ValueError(f"{name}: packed attention would ignore it; expected none in a packed call")

    rows_and_columns = (query.shape[0], query.shape[2])
    device = query.device.type
    # Rotary embeddings leave queries and keys in float32 under autocast, which casts for sdpa but not for the kernel.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    # [B, H, T, D] -> [B * T, H, D]
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    attend = _attend_by_kernel if _has_kernel(query) else _attend_by_loop
    attended = attend(query, key, value, cu_seq_lens_q, max_length_q, scaling)
    return attended.unflatten(0, rows_and_columns), None


def _has_kernel(query: torch.Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and torch.cuda.get_device_properties(query.device).major >= 8


def _attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scaling: float | None,
) -> Any:
    """[tokens, heads, head size] to the same; the host does not wait for the device."""
    borders = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    causal = (-1, 0)  # all tokens before, none after
    return varlen_attn(query, key, value, *borders, scale=scaling, window_size=causal, enable_gqa=True)


# A compiled loop would be compiled anew for every batch, since lengths differ.
@torch.compiler.disable
def _attend_by_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scaling: float | None,
) -> torch.Tensor:
    """[tokens, heads, head size] to the same, one sample after another."""
    lengths = cu_seq_lens.diff().tolist()
    samples = zip(*(states.split(lengths) for states in (query, key, value)), strict=True)
    attended = []
    for sample in samples:
        q, k, v = (states.transpose(0, 1)[None] for states in sample)  # [1, heads, length, head size]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)
