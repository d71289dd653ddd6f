"""Sequence parallelism (Ulysses): each of N ranks holds a slice of the sequence, T / N tokens of each row.

Everything but attention looks at one token at a time. All-to-alls around attention switch from sequence to head
sharding, so that each rank attends with H / N heads over whole rows, by the same kernels and with the same bounds of
samples: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.

Promises:

- The losses of a micro-batch are those that one process would compute, on each of the N. So an objective sees whole
  rows. Gradients are summed over all processes: each computes those by way of its own tokens.
- A row is padded to a multiple of N on the right, where causal attention does not look.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kit.model.layers.attention import longest_pack, needs_mask, why_not_varlen
from kit.model.layers.packs import layers_along_rows
from kit.model.layers.sequence_group import SequenceGroup
from kit.system.errors import Problem

# Families whose layers do not pass the bounds of rows on to attention. ``kit.train.checks`` finds others, but not
# in a teacher.
_NO_BOUNDS = {"doge", "nemotron"}


class _Gather(torch.autograd.Function):
    """All-gathers the values of the targets of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, at: torch.Tensor, num_targets: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(at)
        whole = own.new_zeros(num_targets, *own.shape[1:])
        whole[at] = own
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        (at,) = ctx.saved_tensors
        # All processes compute the same from the whole, so this is the gradient already, not a part of it.
        return arriving[0][at], None, None, None


def indices(mask: torch.Tensor) -> torch.Tensor:
    """Return where a mask [S] is true, int64. The host waits for the device."""
    return mask.nonzero()[:, 0]


class SequenceSlice:
    """This rank's slice of the sequences of one micro-batch.

    The host waits for the device once, to learn how many targets are here.
    """

    def __init__(self, group: SequenceGroup, input_ids: torch.Tensor, target_positions: torch.Tensor) -> None:
        """
        Args:
            input_ids: int64 [B, T].
            target_positions: int64 [S], ``b * T + t``.
        """
        self._group = group
        self._shape = input_ids.shape
        length = input_ids.shape[1]
        self._missing = -length % group.size
        self._num_tokens = (length + self._missing) // group.size  # of a row, here
        self._start = group.index * self._num_tokens
        self._num_targets = len(target_positions)
        place = target_positions % length - self._start
        self.at = indices((place >= 0) & (place < self._num_tokens))  # which targets are here
        self.target_positions = (target_positions // length * self._num_tokens + place)[self.at]

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of [B, T] or [B, T, d]."""
        padding = (0, 0) * (tokens.ndim - 2) + (0, self._missing)
        return F.pad(tokens, padding)[:, self._start : self._start + self._num_tokens]

    def inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the decoder for this slice, from those for whole rows.

        A row that is no pack is a sample: its padding comes after all that attends.
        """
        (rows, length), device = self._shape, given["input_ids"].device
        whole = length + self._missing
        bounds = given.get("cu_seq_lens_q")
        if bounds is None:
            bounds = torch.arange(0, (rows + 1) * whole, whole, dtype=torch.int32, device=device)
            positions, longest = torch.arange(length, device=device).expand(rows, -1), whole
        else:
            bounds = bounds + self._missing * (bounds // length)  # the last sample of a row gets what is missing
            positions, longest = given["position_ids"], given["max_length_q"] + self._missing
        return given | {
            "attention_mask": None,
            "input_ids": self.of(given["input_ids"]),
            "position_ids": self.of(positions),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
            "sequence_group": self._group,
        }

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of the embeddings here, from one that adds something to those of whole rows, [B, T, d]."""

        def changed(embeddings: torch.Tensor) -> torch.Tensor:
            added = change(embeddings.new_zeros(*self._shape, embeddings.shape[-1]))
            return embeddings + self.of(added)

        return changed

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the values of all S targets, [S, ...], from those of the targets here."""
        whole: torch.Tensor = _Gather.apply(own, self.at, self._num_targets, self._group.group)
        return whole


def sequence_problems(size: int, settings: Any, config: Any, meta_model: Any, router_loss: float) -> list[Problem]:
    """Return why this model does not support sequence parallelism over ``size`` processes; nothing if it does.

    Args:
        settings: of the recipe.
        router_loss: the coefficient of the auxiliary loss of routers.
    """
    if size == 1:
        return []
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    limit = longest_pack(config)
    layers = layers_along_rows(meta_model)
    expected, fix = "1 for this model", ""
    if reason := why_not_varlen(config):
        found = reason
    elif needs_mask(config):
        found = f"{text.model_type}, whose gradients depend on the padding mask"
    elif text.model_type in _NO_BOUNDS:
        found = f"{text.model_type}, whose layers do not pass sequence bounds to attention"
    elif layers:
        found = f"{type(layers[0]).__name__}, a recurrent layer or convolution"
    elif limit:
        found = f"{limit[1]}: a layer depends on the position in the row"
    elif "dynamic" in kinds:
        found = "dynamic RoPE: the longest row sets the frequencies"
    elif settings.attn_implementation not in ("auto", "varlen"):
        found, fix = f"attn_implementation {settings.attn_implementation}", "--attn_implementation auto"
    elif router_loss:
        found = f"router_aux_loss_coef {router_loss:g}, a load-balancing loss over the tokens of one process"
        fix = "--router_aux_loss_coef 0; expert load may become unbalanced"
    elif heads % size:
        found = f"{heads} attention heads"
        expected = f"one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
    else:
        return []
    return [Problem("sequence_parallel_size", f"{size}, with {found}", expected, fix)]
