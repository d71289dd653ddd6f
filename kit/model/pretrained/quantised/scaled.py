"""FP8, compressed-tensors and MXFP4: floats and integers of 8 bits or less, with scales.

A weight of FP8 (``quant_method: fp8``: Qwen3, DeepSeek V3 and others) has ``_scale_inv``. Those of compressed-tensors,
the format of llm-compressor, are read by the layout of its version 0.20: packed integers (W4A16 and others), int8, FP8,
NVFP4, MXFP4 and MXFP8. What it would do to inputs is left out.
"""

import re
from typing import Any

import torch

from kit.model.pretrained.quantised.values import Form, Parts, Quantisation, bits_of, times_scales, unpacked

_FORMATS = """pack-quantized int-quantized float-quantized naive-quantized nvfp4-pack-quantized mxfp4-pack-quantized
    mxfp8-quantized mixed-precision""".split()


def _scaled(quantisation: Quantisation, parts: Parts) -> torch.Tensor:
    """A weight ``[..., out, in]`` of values, or packed ones, and scales of any blocks."""
    values, scales = parts["packed"] if "packed" in parts else parts[""], parts["scale"]
    zeros = parts.get("zero_point", torch.zeros(scales.shape))
    if scales.dtype == torch.uint8:  # exponents of 2
        scales = scales.view(torch.float8_e8m0fnu)
    if "global_scale" in parts:
        scales = scales.float() / parts["global_scale"]
    if "shape" in parts:
        rows, columns = parts["shape"].tolist()
        bits = bits_of(values, columns)
        half = 1 << bits - 1
        values = unpacked(values, bits, columns) - half
        if zeros.dtype == torch.int32:
            zeros = unpacked(zeros.T, bits, rows).T - half
    elif "packed" in parts:
        from transformers.integrations.mxfp4 import FP4_VALUES

        values = torch.tensor(FP4_VALUES)[unpacked(values, 4, 2 * values.shape[1]).long()]
    elif values.element_size() > 1:  # it is not quantised
        raise ValueError
    if "g_idx" in parts:
        groups = parts["g_idx"].long()
        scales, zeros = scales[:, groups], zeros[:, groups]
    block = quantisation.get("weight_block_size", (128, 128))  # as transformers and llm-compressor have by default
    return times_scales(values, scales, zeros, block)


def _mxfp4(_: Quantisation, parts: Parts) -> Any:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # bfloat16 holds these values exactly: three bits times a power of 2. So it does those of bytes.
    return convert_moe_packed_tensors(parts["blocks"], parts["scales"])


FP8 = Form(
    lambda quantisation, _: quantisation.get("expert_dtype", "fp8") == "fp8", re.compile("(.*)_(scale)_inv"), _scaled
)
COMPRESSED = Form(
    lambda quantisation, _: quantisation["format"] in _FORMATS and not quantisation.get("transform_config"),
    re.compile(r"(.*\.weight)_(packed|scale|zero_point|shape|g_idx|global_scale)"),
    _scaled,
)
MXFP4 = Form(lambda _, config: config.model_type == "gpt_oss", re.compile("(.*)_(blocks|scales)"), _mxfp4)
KEPT_MXFP4 = MXFP4._replace(
    weight=lambda _, parts: torch.cat([parts["blocks"], parts["scales"].unsqueeze(-1)], dim=-1)  # see ``Mxfp4Experts``
)
