"""Packed variable-length attention, registered with transformers under the name ``VARLEN``.

A packed call has ``input_ids`` [B, T], in which each row is a pack, and these arguments:

- ``position_ids`` [B, T], which start at 0 with every sample; ``attention_mask=None``; ``use_cache=False``;
- ``cu_seq_lens_q`` int32 [n + 1], the bounds of the samples in the B * T tokens. The padding of a row counts as a
  sample, because the bounds must cover every token;
- ``max_length_q``, the tokens of the longest sample or more.

Promises:

- In a packed call a token attends only to its own sample, up to itself, and no mask [B, 1, T, T] is built.
- Calls without ``cu_seq_lens_q`` go to sdpa with its mask: padded batches, generation with a cache, and packs that only
  ``position_ids`` show.
- A packed call is refused if it has a mask of padding or a cache, or an option of attention that would be ignored.
- A model whose attention does not use this function fails at the mask, which is not a tensor. It never runs unmasked.
- On a CPU, in float32, and on GPUs before Ampere a loop over the samples gives the same result. It is not compiled.
- Where sdpa has no kernel on a GPU that takes keys of fewer heads than queries, it gets each head of keys once for each
  head of queries, so that it need not hold scores [H, T, T].
- On a GPU the kernel is the one in torch, FlashAttention 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from kit.model.layers.sequence_group import SequenceGroup
from kit.model.pretrained.classes import model_class

# The name must contain "sdpa": then transformers applies its checks for sdpa, and refuses a model without support.
VARLEN = "sdpa_varlen"
# Families of causal models by name whose tokens attend to later ones too, whatever their config says.
NOT_CAUSAL = {"xlnet", "cpmant"}
# Families of which gradients change by more than 1e-5 without a mask (MiniMax: by 5e-4).
_NEED_MASK = {"minimax"}
# Arguments of a packed call that the attention function may ignore.
_IGNORED_ARGUMENTS = {"position_ids", "cu_seq_lens_k", "max_length_k", "output_router_logits"}


def register_varlen() -> None:
    """Register ``VARLEN`` with transformers; models built after this call may use it.

    And let ``takes_groups`` decide which keys transformers gives to sdpa.
    """
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, _mask_of_call)
    sdpa_attention.use_gqa_in_sdpa = _gives_groups


def needs_mask(config: Any) -> bool:
    """Return whether padding on the right needs a mask. It needs none if a token sees only itself and earlier ones.

    ``benchmarks/families.py`` compares the loss and the gradients of each family with a mask and without.
    """
    return not is_causal(config) or config.get_text_config().model_type in _NEED_MASK


def turn_off_cudnn_if_masked(config: Any, attention: str, packing: bool, router_loss: bool) -> None:
    """Turn cuDNN's attention off in this process if a step of this model may give sdpa a mask.

    The gradients of cuDNN's attention with a mask may be NaN (pytorch issue 196678). Without a mask it is right, and on
    GPUs for which it is sdpa's first choice the fastest. A mask is built for padding where ``needs_mask`` or the
    routers ask for it, for a window, and for packs without ``VARLEN``.

    Args:
        attention: the name of the model's attention, as ``kit.model.build.attention_of`` returns it.
        router_loss: whether the routers have a loss, whose statistics leave padding out.
    """
    packs_need_mask = packing and attention != VARLEN
    if needs_mask(config) or why_not_varlen(config) or packs_need_mask or router_loss:
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turn cuDNN's attention off in the ``with`` block, in which a model generates.

    On a B200 it makes wrong tokens with fewer than 8 heads of keys (pytorch issue 193893). And each token is another
    length, for which cuDNN would make a plan.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def is_causal(config: Any) -> bool:
    """Return whether a token attends only to earlier tokens and itself."""
    configs = (config, config.get_text_config())
    if config.model_type in NOT_CAUSAL or not all(getattr(each, "is_causal", True) for each in configs):
        return False
    return not any(getattr(each, "use_bidirectional_attention", False) for each in configs)


@contextmanager
def without_search_for_packs() -> Iterator[None]:
    """Keep transformers from searching ``position_ids`` for packs in the ``with`` block.

    Without a mask it searches them in each forward pass, and the host waits for the device's answer.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def supports_sdpa(config: Any) -> bool:
    """Return whether the model class of ``config`` takes sdpa; true for a class that transformers does not know.

    Gemma 2 caps its attention scores, gpt-oss adds a sink to them, BLOOM and MPT a bias: sdpa would leave that out.
    """
    return getattr(model_class(config), "_supports_sdpa", True)


def attention_by_part(config: Any, attention: str) -> str | dict[str, str]:
    """Return ``attention`` as transformers takes it: for each part of the model, if one takes eager attention only.

    Gemma 4's audio encoder does. No row of text reaches it.
    """
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    eager = {
        name
        for name, part in parts.items()
        if type(part) in MODEL_MAPPING and not getattr(MODEL_MAPPING[type(part)], "_supports_sdpa", True)
    }
    if attention == "eager" or not eager:
        return attention
    return {"": attention} | {name: "eager" if name in eager else attention for name in parts}


def why_not_varlen(config: Any) -> str:
    """Return why a model with this ``config`` cannot use packed attention; an empty string if it can."""
    if not supports_sdpa(config):
        return "a model class that supports eager attention only"
    if not getattr(model_class(config), "_supports_attention_backend", True):
        return "a model class with its own kernels"
    if config.get_text_config() is not config:
        return "a multimodal model"
    if not is_causal(config):
        return "attention that is not causal"
    layer_types = getattr(config, "layer_types", None)
    for other in sorted(set(layer_types or ()) - {"full_attention"}):
        return f"layers of {other}"
    # If a config has ``layer_types``, only these decide; a number such as ``sliding_window`` may be set but unused.
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


def longest_pack(config: Any) -> tuple[int, str] | None:
    """Return how long packs may be in which a sample has the losses that it has alone; None if there is no limit.

    The layers of transformers that are named here know a token by its place in the row, but only beyond a number of
    tokens, so that ``kit.train.checks.isolation`` does not see it in a short pack.

    Returns:
        The limit in tokens, and the key of the config that sets it, with its value.
    """
    text = config.get_text_config()
    is_sparse = any("sparse" in kind for kind in getattr(text, "layer_types", None) or ())
    is_tuned = getattr(text, "attn_temperature_tuning", False) and 0 in text.no_rope_layers
    limits = {
        # A layer chooses this many tokens of the row, and of those with equal scores by their places (DeepSeek V3.2).
        "index_topk": getattr(text, "index_topk", None),
        # A layer chooses blocks of keys, which begin where the row begins (MiniMax M3).
        "index_block_size": getattr(text, "index_block_size", None) if is_sparse else None,
        # In layers without rotary positions, the temperature of attention changes with the place in the row (Llama 4).
        "floor_scale": getattr(text, "floor_scale", None) if is_tuned else None,
        # The longest sample of a row sets the frequencies of the positions of all (Phi 3).
        "original_max_position_embeddings": _longrope_limit(text),
    }
    found = [(int(value) - (name == "floor_scale"), f"{name} {value}") for name, value in limits.items() if value]
    return min(found, default=None)


def describe_long_rows(config: Any, max_length: int, rows: int) -> list[str]:
    """Return a line if the rows of a micro-batch may change each other's losses; else nothing.

    Args:
        max_length: tokens of the longest row.
        rows: of a micro-batch.
    """
    limit = _longrope_limit(config.get_text_config())
    if not limit or max_length <= limit or rows == 1:
        return []
    return [
        f"longrope: a row of more than {limit} tokens changes the losses of the others in its micro-batch;"
        f" --per_device_train_batch_size 1, or --max_length {limit}, keeps them apart"
    ]


def _longrope_limit(text_config: Any) -> int | None:
    """The tokens beyond which a row gets other frequencies of its positions (Phi 3); None for other kinds of rope."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("rope_type") == "longrope"]
    return min((limit for each in kinds if (limit := each.get("original_max_position_embeddings"))), default=None)


class LazyMask:
    """sdpa's mask for one forward pass without padding, built when a layer first uses it.

    In a packed call no layer uses it. transformers creates the mask before it is known whether the call is packed.
    """

    def __init__(self, **arguments: Any) -> None:
        """``arguments``: those of ``sdpa_mask`` of transformers."""
        self._arguments = arguments

    @cached_property
    def dense(self) -> torch.Tensor | None:
        """The mask, bool [B, 1, T, T]: true where a token attends to another. None for plain causal attention."""
        return sdpa_mask(**self._arguments)


def _mask_of_call(**arguments: Any) -> LazyMask | torch.Tensor | None:
    """Return the mask for ``VARLEN``. A call with a mask of padding is not packed, and gets sdpa's at once.

    Generation always gives one, and with a static cache it gives the result back as the mask of the next call.
    """
    return LazyMask(**arguments) if arguments["attention_mask"] is None else sdpa_mask(**arguments)


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
    max_length_q: Any = None,
    sequence_group: SequenceGroup | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for ``VARLEN``. transformers calls it with these arguments.

    Args:
        query: [B, H, T, D]; key and value have the same number of heads or fewer.
        cu_seq_lens_q: int32 [n + 1], the bounds of the samples, from 0 to B * T. If given, the call is packed. Keys
            have the same bounds.
        max_length_q: tokens of the longest sample, or more.
        sequence_group: of a packed call: the sequence-parallel group. The bounds are those of whole rows, and T
            counts the tokens of a row that are here.

    Returns:
        The attended values [B, T, H, D], and None for the attention weights.

    Raises:
        ValueError: a packed call has a mask or cached tokens, or asks for anything but plain causal attention.
    """
    if cu_seq_lens_q is None:
        mask = attention_mask.dense if isinstance(attention_mask, LazyMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"past_key_values: {key.shape[2] - query.shape[2]} earlier tokens in a packed call")
    if attention_mask is not None and not isinstance(attention_mask, LazyMask):
        raise ValueError(
            "attention_mask: given to a packed call; expected None, since cu_seq_lens_q has the bounds of the samples"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise ValueError("is_causal: false in a packed call")
    options = {"dropout": dropout, **kwargs}
    for name in sorted(options.keys() - _IGNORED_ARGUMENTS):
        option = options[name]
        if isinstance(option, torch.Tensor) or option:
            raise ValueError(f"{name}: packed attention would ignore it; expected none in a packed call")

    dtype = computed_dtype(query)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if sequence_group:
        query, key, value = sequence_group.whole_rows(query, key, value)
    rows_and_columns = (query.shape[0], query.shape[2])
    # [B, H, T, D] -> [B * T, H, D]
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    attend = _attend_by_kernel if has_kernel(query) else _attend_by_loop
    attended = attend(query, key, value, cu_seq_lens_q, max_length_q, scaling).unflatten(0, rows_and_columns)
    return sequence_group.own_tokens(attended) if sequence_group else attended, None


def has_kernel(query: torch.Tensor) -> bool:
    """Return whether packed attention has a kernel for the device and dtype of ``query``; else it takes a loop."""
    half = computed_dtype(query) in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and torch.cuda.get_device_properties(query.device).major >= 8


def takes_groups(key: torch.Tensor) -> bool:
    """Return whether sdpa takes keys of fewer heads than queries for the device and dtype of ``key``.

    On a GPU flash and cuDNN's kernels do, in half precision. In float32 only plain mathematics does, which holds the
    scores of all pairs of tokens: on an H100 `full` of Llama 1B took 65.5 GiB for rows of 4,096 tokens, and 33.5 are
    planned without scores.
    """
    return not key.is_cuda or has_kernel(key)


def _gives_groups(attention_mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """In place of ``use_gqa_in_sdpa`` of transformers, which looks at the mask and the head's size only."""
    return bool(use_gqa_in_sdpa(attention_mask, key, value)) and takes_groups(key)


def computed_dtype(states: torch.Tensor) -> torch.dtype:
    """The dtype in which ``states`` are computed with: under autocast that of the device, though they may be float32.

    Rotary embeddings leave queries and keys so; autocast casts them for sdpa, but not for the kernel of packs.
    """
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scaling: float | None,
) -> Any:
    """Inputs and output are [tokens, heads, head size]. The host does not wait for the device."""
    bounds = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    causal = (-1, 0)  # the window: all tokens before, none after
    return varlen_attn(query, key, value, *bounds, scale=scaling, window_size=causal, enable_gqa=True)


@torch.compiler.disable(reason="packed attention without a kernel is a loop over samples, other ones in each batch")
def _attend_by_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scaling: float | None,
) -> torch.Tensor:
    """Inputs and output are [tokens, heads, head size]. Computes one sample after another."""
    lengths = cu_seq_lens.diff().tolist()
    if not takes_groups(key):
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    samples = zip(*(states.split(lengths) for states in (query, key, value)), strict=True)
    attended = []
    for sample in samples:
        q, k, v = (states.transpose(0, 1)[None] for states in sample)  # [1, heads, length, head size]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)
