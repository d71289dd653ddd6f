"""Quantised checkpoints (FP8, MXFP4) that are dequantised when they are read.

Promises: a weight is value times scale, computed in float32 and rounded once to the dtype in which it is loaded, as if
the files held that model. Only the files know of the quantisation: what is trained, saved and counted is the plain
model. What cannot be read so is refused by name. ``qlora`` keeps MXFP4 as it is, see ``kit.model.experts.mxfp4``.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import modeling_utils

from kit.model.experts.mxfp4 import joined
from kit.system.errors import UserError

_SCALE = "_scale_inv"  # added to the name of an FP8 weight; the value is multiplied by it, whatever the name says
_BLOCKS, _SCALES = "_blocks", "_scales"  # of an MXFP4 weight, added to its name
_DEFAULT_BLOCK = (128, 128)  # of transformers, where the config names none


def quantisation_of(config: Any) -> Any:
    """Return what the config says of the files' quantisation, a dict unless the config is damaged; None if nothing."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(), "quantization_config", None)


def is_read_plain(config: Any) -> bool:
    """Return whether a quantised checkpoint can be read as plain weights, as far as its config shows it."""
    quantisation = quantisation_of(config)
    if not isinstance(quantisation, dict):
        return False
    if quantisation.get("quant_method") == "mxfp4":
        return config.model_type == "gpt_oss"
    if quantisation.get("quant_method") != "fp8" or quantisation.get("expert_dtype", "fp8") != "fp8":
        return False
    block = quantisation.get("weight_block_size", _DEFAULT_BLOCK)
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    return block is None or (is_pair and all(type(size) is int and size > 0 for size in block))


def plain_config(config: Any) -> Any:
    """Return a copy of a config without the files' quantisation: that of the model which is trained and saved."""
    plain = copy.deepcopy(config)
    for each in (plain, plain.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return plain


def in_mxfp4(config: Any) -> bool:
    """Return whether the files hold experts in MXFP4."""
    return is_read_plain(config) and quantisation_of(config)["quant_method"] == "mxfp4"


def describe_dequantised(config: Any, method: str) -> list[str]:
    """Say in one line what is done with a quantised base; empty if its files hold plain weights."""
    if not is_read_plain(config):
        return []
    if method == "qlora" and in_mxfp4(config):
        return ["note: the experts of the base checkpoint are MXFP4, and stay so"]
    how = quantisation_of(config)["quant_method"].upper()
    return [f"note: the base checkpoint is {how}: it is dequantised (value times scale) and trained as a plain model"]


def class_that_dequantises(config: Any) -> str:
    """Return the class of transformers whose ``dequantize=True`` opens the same weights; empty for plain files."""
    how = quantisation_of(config) and quantisation_of(config)["quant_method"]
    return {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}.get(how, "")


@contextmanager
def dequantising(config: Any, name: str, method: str) -> Iterator[None]:
    """In the ``with`` block, transformers dequantises the weights of a checkpoint with this ``config``.

    Args:
        name: of the checkpoint, for messages.
        method: with ``qlora`` experts in MXFP4 are read as they are, see ``joined``.

    Raises:
        UserError: from transformers' ``from_pretrained``, before a weight is read: weights and scales do not fit.
    """
    quantisation = quantisation_of(config)
    plain = partial(_plain_mxfp4, joined if method == "qlora" else None) if in_mxfp4(config) else _plain_fp8
    load = modeling_utils.convert_and_load_state_dict_in_model

    def load_plain(model: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(model, plain(state_dict, quantisation, name), *args, **kwargs)

    modeling_utils.convert_and_load_state_dict_in_model = load_plain
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = load


class _Weight:
    """A weight that is computed when transformers reads it, by ``[...]`` as from a file."""

    _one_at_a_time = threading.Lock()  # transformers reads in several threads: float32 forms would add up

    def __init__(self, compute: Callable[..., torch.Tensor], *parts: Any) -> None:
        self._compute, self._parts = compute, parts

    def __getitem__(self, key: Any) -> torch.Tensor:
        with self._one_at_a_time:
            return self._compute(*(part[...] for part in self._parts))[key]


def _plain_fp8(files: Mapping[str, Any], quantisation: dict[str, Any], name: str) -> dict[str, Any]:
    block = quantisation.get("weight_block_size", _DEFAULT_BLOCK)
    plain: dict[str, Any] = {}
    for key, value in files.items():
        if key.endswith((_SCALE, "activation_scale")):
            continue  # nothing that training computes is rounded to 8 bits, so the scales of inputs are not needed
        if _dtype(value) != torch.float8_e4m3fn:
            if _dtype(value).itemsize == 1:  # two values of 4 bits, or another float of 8
                _refuse(name, f"{key} is of {_dtype(value)}")
            plain[key] = value
            continue
        scales = files.get(key + _SCALE)
        if scales is None:
            _refuse(name, f"{key} is of 8 bits and has no {key + _SCALE}")
        *batch, rows, columns = shape = _shape(value)
        height, width = block or (rows, columns)
        grid = (*batch, math.ceil(rows / height), math.ceil(columns / width))
        fits = math.prod(_shape(scales)) == math.prod(grid) if block is None else _shape(scales) == grid
        if not fits or not _dtype(scales).is_floating_point:
            found = f"{key} of {shape} has scales of {_shape(scales)}, {_dtype(scales)}"
            _refuse(name, found, f"floats of {grid} for blocks of {height} x {width}")
        plain[key] = _Weight(partial(_times_scales, grid=grid, block=(height, width)), value, scales)
    return plain


def _times_scales(
    weight: torch.Tensor, scales: torch.Tensor, grid: tuple[int, ...], block: tuple[int, int]
) -> torch.Tensor:
    """Return a weight ``[..., rows, columns]`` in float32.

    Blocks begin at its first row and column, so those of the last ones may be cut: transformers' own dequantisation
    divides such a weight into equal blocks, which are others.
    """
    rows, columns = weight.shape[-2:]
    scales = scales.float().reshape(grid)
    scales = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return weight.float().mul_(scales)


def _plain_mxfp4(
    compute: Callable[..., torch.Tensor] | None, files: Mapping[str, Any], quantisation: dict[str, Any], name: str
) -> dict[str, Any]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain: dict[str, Any] = {}
    for key, value in files.items():
        if _dtype(value) != torch.uint8:
            plain[key] = value
            continue
        stem = key.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = files.get(stem + _BLOCKS), files.get(stem + _SCALES)
        if blocks is None or scales is None or _shape(blocks)[:-1] != _shape(scales):
            _refuse(name, f"{key} is of bytes", f"{stem}{_BLOCKS} with {stem}{_SCALES} of its shape")
        # bfloat16 holds these values exactly: three bits times a power of 2. So it does those of bytes.
        plain[stem] = _Weight(compute or convert_moe_packed_tensors, blocks, scales)
    return plain


def _refuse(name: str, found: str, expected: str = "weights of FP8 (e4m3) with scales, or floats") -> NoReturn:
    fix = "give the model that it was made from"
    raise UserError("model_name_or_path", f"{name}: {found}", expected, fix)


def _dtype(value: Any) -> torch.dtype:
    if not hasattr(value, "get_dtype"):
        return value.dtype
    return modeling_utils.str_to_torch_dtype.get(value.get_dtype(), torch.uint8)  # others have 8 bits or less


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.get_shape() if hasattr(value, "get_shape") else value.shape)
