"""Quantised values: how integers are packed, and which number a value, its zero point and its scale stand for."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

Quantisation = dict[str, Any]  # ``quantization_config`` of a config.json
Parts = dict[str, torch.Tensor]  # the tensors of a weight, by the second group of ``Form.names``


class Form(NamedTuple):
    """A form of quantised checkpoints."""

    is_read: Callable[[Quantisation, Any], bool]  # whether it is read with this and the model's config; an error: not
    names: re.Pattern[str]  # of the tensors of a weight: what they have in common, and what each is
    # The weight [..., out, in] of its parts. It raises an error if their shapes or dtypes do not fit, also on meta.
    weight: Callable[[Quantisation, Parts], torch.Tensor]
    ending: str = ""  # of the weight's name, after what its parts have in common


def times_scales(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, block: Any = None) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, ``[..., rows, columns]`` as the values.

    Args:
        scales: ``[..., blocks of rows, blocks of columns]``, of the whole weight, of rows, or of equal parts of rows.
        zeros: the zero points, as the scales.
        block: rows and columns of other blocks. They begin at the first row and column, so the last ones may be cut:
            transformers' own dequantisation of FP8 divides such a weight into equal blocks, which are others.

    Raises:
        ValueError: there are more or fewer scales.
    """
    *batch, rows, columns = values.shape
    *_, grid_rows, grid_columns = (1, 1, *scales.shape)
    if grid_rows == rows or grid_rows * grid_columns == 1:
        block = rows // grid_rows, columns // grid_columns
    height, width = block
    grid = (*batch, math.ceil(rows / height), math.ceil(columns / width))
    if scales.numel() > 1 and scales.shape != grid:
        raise ValueError

    def spread(each: torch.Tensor) -> torch.Tensor:
        each = each.float().reshape(grid).repeat_interleave(height, -2)[..., :rows, :]
        return each.repeat_interleave(width, -1)[..., :columns]

    return (values.float() - spread(zeros)).mul_(spread(scales))


def bits_of(words: torch.Tensor, number: int) -> int:
    """Return how many bits each of ``number`` numbers has that fill a row of int32. Raises ``ValueError``: unclear."""
    if words.dtype != torch.int32 or number < 32:
        raise ValueError
    return 32 * words.shape[1] // number


def unpacked(words: torch.Tensor, bits: int, number: int) -> torch.Tensor:
    """Return ``number`` numbers of ``bits`` bits of each row of integers, int16 [rows, number].

    They lie one after another, the lowest bits first, also across the end of an integer.
    """
    start = torch.arange(number) * bits
    taken = pad(words.contiguous().view(torch.uint8), (0, 1)).short()  # a number has bits of one byte or of two
    both = taken[:, start // 8] | taken[:, start // 8 + 1] << 8
    return both >> (start % 8).short() & (1 << bits) - 1
