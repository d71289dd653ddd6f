"""4-bit weights where the whole model does not fit on a GPU: made there one by one, or built on meta to be sent.

Promises: they are made on the device that trains, wherever they are kept, so they have the bits of a run that keeps
them there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kit.model.parts import quantised_on_meta


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """In the ``with`` block, let transformers quantise each weight on ``device``, and keep it on the CPU."""
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize  # it imports bitsandbytes, which may be broken

    convert = Bnb4bitQuantize.convert

    def convert_there(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        weights = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        made = convert(self, {name: weight.to(device) for name, weight in weights.items()}, *args, **kwargs)
        return {name: weight.to("cpu") for name, weight in made.items()}

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
            form = {key: getattr(module.weight, key) for key in ("compress_statistics", "quant_type", "quant_storage")}
            # Not in the weight: a state dict would read a value of the tables. A forward pass finds them in the module.
            packed, module.quant_state = functional.quantize_4bit(module.weight.data.to(compute_dtype), **form)
            module.weight = Params4bit(packed, bnb_quantized=True, module=module, **form)
    return model
