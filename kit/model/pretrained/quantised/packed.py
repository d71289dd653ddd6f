"""GPTQ and AWQ: integers of a few bits, packed into int32, with a scale and a zero point for each group of inputs.

GPTQ (https://arxiv.org/abs/2210.17323) as AutoGPTQ and GPTQModel write it. The shapes tell how many bits and groups a
weight has, so rules that give them to modules (``dynamic``) need not be known. AWQ (https://arxiv.org/abs/2306.00978)
as AutoAWQ writes it in its version GEMM.
"""

import re

import torch

from kit.model.pretrained.quantised.values import Form, Parts, Quantisation, bits_of, times_scales, unpacked

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has eight successive numbers


def _format(quantisation: Quantisation) -> str:
    return quantisation.get("checkpoint_format") or quantisation.get("format") or "gptq"


def _gptq(quantisation: Quantisation, parts: Parts) -> torch.Tensor:
    """A weight of ``qweight`` [in * bits / 32, out], ``qzeros`` [groups, out * bits / 32], ``scales`` and ``g_idx``."""
    words, zeros, groups, scales = parts["qweight"].T, parts["qzeros"], parts["g_idx"].long(), parts["scales"]
    bits, num_outputs = bits_of(words, len(groups)), scales.shape[1]
    if bits not in (2, 3, 4, 8):
        raise ValueError
    # The first format stores zero points less one. GPTQModel subtracts it from words, unless numbers cross their ends.
    less = int(_format(quantisation) == "gptq")
    if bits != 3:
        zeros = unpacked(zeros + less * sum(1 << i for i in range(0, 32, bits)), bits, num_outputs)
    else:
        zeros = unpacked(zeros, bits, num_outputs) + less & 7
    return times_scales(unpacked(words, bits, len(groups)), scales.T[:, groups], zeros.T[:, groups])


def _awq(_: Quantisation, parts: Parts) -> torch.Tensor:
    """A weight of ``qweight`` [in, out / 8], ``qzeros`` [groups, out / 8] and ``scales`` [groups, out]."""
    scales = parts["scales"].T
    if 8 * parts["qweight"].shape[1] != len(scales):  # not four bits
        raise ValueError
    values, zeros = (
        unpacked(parts[name], 4, len(scales)).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T.contiguous()
        for name in ("qweight", "qzeros")
    )
    return times_scales(values, scales, zeros)


_NAMES = re.compile(r"(.*)\.(qweight|qzeros|scales|g_idx)")
GPTQ = Form(lambda quantisation, _: _format(quantisation) in ("gptq", "gptq_v2"), _NAMES, _gptq, ".weight")
AWQ = Form(lambda quantisation, _: quantisation.get("version", "gemm").lower() == "gemm", _NAMES, _awq, ".weight")
