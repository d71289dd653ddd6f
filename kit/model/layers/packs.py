"""Keep packed samples independent in layers that know only rows: recurrent layers, convolutions, and their masks.

transformers keeps them independent in attention, by positions that restart with each sample. Three things are left:

- A layer with a state or a convolution along the row (Mamba, gated delta rule, short convolution) runs on from one
  sample into the next. Here such a layer gets each sample in a separate row. Samples of similar length make one
  batch, padded on the right, which a causal layer does not see; less than half of a batch is padding.
- Some families make their masks without the positions (gpt-oss). Here the bounds of the samples are added to the mask.
- ALiBi (Falcon, BLOOM) is a slope times the place in the row, rounded to bf16: far to the right it differs by more from
  one token to the next than at the start. Here each sample gets the values of the start of the row.

``kit.train.checks`` proves on the model that is trained that the samples do not see each other. A layer that is not
named here is therefore refused, not trained wrong.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, packed_sequence_mask_function

# How the classes of such layers end. Each maps [B, T, h] to [B, T, h] and reads nothing else that has an entry for each
# token.
_ENDINGS = tuple(
    "BambaMixer DeltaAttention FalconH1Mixer GatedDeltaNet Mamba2Mixer MambaLayer MambaMixer ShortConv".split()
)

_ALIBI = "build_alibi_tensor"  # a function in the module of the family


class Packs:
    """The samples of the micro-batch that a model computes, for its layers. It has none of a padded micro-batch.

    The backward pass may compute a layer again (checkpointing), so the samples stay until the next forward pass.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self._lengths: tuple[int, ...] = ()

    def begin(self, lengths: tuple[int, ...] | None) -> None:
        """Take the samples of the next forward pass.

        Args:
            lengths: tokens of each, padding included as a sample, one after the other over all B * T tokens; None: the
                micro-batch is not packed.
        """
        self._lengths = lengths or ()

    def apart(self, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return what a layer computes of hidden states [B, T, h], each sample in a separate row."""
        if hidden.shape[:2].numel() != sum(self._lengths):  # not packed, or a layer of an encoder
            return forward(hidden, **kwargs)
        samples = hidden.flatten(0, 1).split(self._lengths)
        by_size: dict[int, list[int]] = {}  # the samples of up to 1, 2, 4, 8, ... tokens
        for i, length in enumerate(self._lengths):
            by_size.setdefault((length - 1).bit_length(), []).append(i)
        outputs: dict[int, torch.Tensor] = {}
        for alike in by_size.values():
            rows = forward(pad_sequence([samples[i] for i in alike], batch_first=True), **kwargs)
            outputs |= {i: row[: len(samples[i])] for i, row in zip(alike, rows, strict=True)}
        return torch.cat([outputs[i] for i in range(len(samples))]).view_as(hidden)


def layers_along_rows(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the recurrent layers and convolutions of ``model`` that ``install_packs`` knows."""
    return [each for each in model.modules() if type(each).__name__.endswith(_ENDINGS)]


def install_packs(model: torch.nn.Module) -> Packs | None:
    """Let the recurrent layers and convolutions of ``model`` process one packed sample at a time.

    Returns:
        What must know the samples of each forward pass; None if the model has no such layer.
    """
    layers = layers_along_rows(model)
    if not layers:
        return None
    packs = Packs()

    def bind(layer: Any) -> None:
        plain_forward = layer.forward

        def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return packs.apart(plain_forward, hidden_states, **kwargs)

        layer.forward = MethodType(forward, layer)

    for layer in layers:
        bind(layer)
    return packs


@contextmanager
def masks_of_packs(model: Any, position_ids: torch.Tensor) -> Iterator[None]:
    """In the ``with`` block, let no token attend to another sample, also if the family does not look at positions.

    If ``has_alibi``, its values are those of ``position_ids``. The call of the model then needs a mask [B, T] of ones:
    without one BLOOM computes ALiBi elsewhere.

    Args:
        position_ids: [B, T], which begin at 0 with each sample.
    """
    name = model.config._attn_implementation
    plain = ALL_MASK_ATTENTION_FUNCTIONS[name]
    same_sample = packed_sequence_mask_function((position_ids == 0).cumsum(-1))
    num_tokens = position_ids.shape[1]
    of_text = (type(model.config), type(model.config.get_text_config()))

    def masks(**kwargs: Any) -> Any:
        if (kwargs["q_length"], kwargs["kv_length"]) != (num_tokens, num_tokens) or type(
            kwargs["config"]
        ) not in of_text:
            return plain(**kwargs)  # of something else than the tokens, such as patches of bytes (BLT) or of an image
        mask_function = and_masks(kwargs.pop("mask_function"), same_sample)
        return plain(**{**kwargs, "mask_function": mask_function, "allow_is_causal_skip": False})

    family = family_of(model)
    build_alibi: Any = getattr(family, _ALIBI, None)

    def alibi_of_samples(*args: Any, **kwargs: Any) -> torch.Tensor:
        of_row = build_alibi(*args, **kwargs).unflatten(0, (len(position_ids), -1))[0, :, 0]  # [H, T], in each row
        return of_row[:, position_ids].transpose(0, 1).flatten(0, 1)[:, None]  # [B * H, 1, T]

    ALL_MASK_ATTENTION_FUNCTIONS[name] = masks  # stands before the registered one, which stays
    if build_alibi:
        setattr(family, _ALIBI, alibi_of_samples)
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]
        if build_alibi:
            setattr(family, _ALIBI, build_alibi)


def has_alibi(model: Any) -> bool:
    """Return whether the family of ``model`` has the function with which Falcon and BLOOM compute ALiBi."""
    return hasattr(family_of(model), _ALIBI)


def family_of(model: Any) -> Any:
    """Return the Python module with the functions of the model's family. A wrapper may have changed its class."""
    return sys.modules[type(model).forward.__module__]
