"""4-bit weights of ``qlora``: their settings, and how they are made where the whole model does not fit on a GPU.

Promises: they are made on the device that trains, wherever they are kept, so they have the bits of a run that keeps
them there.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import get_keys_to_not_convert

from kit.model.adapters.targets import kept_out_of_4_bit


def four_bit_config(compute_dtype: torch.dtype, meta_model: Any) -> BitsAndBytesConfig:
    """Return the settings of ``qlora``: NF4, double quantisation, stored in the compute dtype.

    Output head, routers, and weights that the model reads past their module stay as they are.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=[*get_keys_to_not_convert(meta_model), *kept_out_of_4_bit(meta_model)],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )


def quantised_on_meta(meta_model: Any, compute_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a copy of a model on meta in which the modules that ``qlora`` would quantise are ``Linear4bit``.

    Their weights keep the shapes that they had; ``packed_on_meta`` packs them.
    """
    quantised = copy.deepcopy(meta_model)
    quantizer = AutoHfQuantizer.from_config(four_bit_config(compute_dtype, meta_model), pre_quantized=False)
    quantizer.preprocess_model(model=quantised, device_map=None)
    quantizer.postprocess_model(quantised)
    return quantised


@contextmanager
def quantising_on(device: str) -> Iterator[None]:
    """In the ``with`` block, let transformers quantise each weight on ``device``, and keep it on the CPU."""
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize  # it imports bitsandbytes, which may be broken

    convert = Bnb4bitQuantize.convert

    def convert_there(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        weights = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        quantised = convert(self, {name: weight.to(device) for name, weight in weights.items()}, *args, **kwargs)
        return {name: weight.to("cpu") for name, weight in quantised.items()}

    Bnb4bitQuantize.convert = convert_there  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bnb4bitQuantize.convert = convert  # type: ignore[method-assign]
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # else shards, which stay, would lie in the blocks of whole matrices


def packed_on_meta(meta_model: Any, compute_dtype: torch.dtype) -> Any:
    """Return a copy of a model on meta in the form in which ``qlora`` loads it, 4-bit weights packed, with tables."""
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit, Params4bit

    # It keeps this table for the process. The first weight would put it on meta.
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    model = quantised_on_meta(meta_model, compute_dtype)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            options = {
                "compress_statistics": weight.compress_statistics,
                "quant_type": weight.quant_type,
                "quant_storage": weight.quant_storage,
            }
            packed, tables = functional.quantize_4bit(weight.data.to(compute_dtype), **options)
            # Not in the weight: a state dict would read a value of the tables. A forward pass finds them in the module.
            module.quant_state = tables
            module.weight = Params4bit(packed, bnb_quantized=True, module=module, **options)
    return model
