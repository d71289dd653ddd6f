"""4-bit weights of ``qlora``: their settings, and how they are made where the whole model does not fit on a GPU.

Promises: they are made on the device that trains, wherever they are kept, so they have the bits of a run that keeps
them there.
"""

import copy
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from kit.model.adapters.targets import kept_out_of_4_bit
from kit.model.experts.forward import install_packed
from kit.model.experts.mxfp4 import GROUP, GROUP_BYTES, Mxfp4Experts
from kit.model.experts.packed import PackedExperts, packable

_NAME = "bitsandbytes_with_experts"


def four_bit_config(compute_dtype: torch.dtype, meta_model: Any, quantise_on: str | None = None) -> BitsAndBytesConfig:
    """Return the settings of ``qlora``: NF4, double quantisation, stored in the compute dtype.

    Output head, routers, and weights that the model reads past their module stay as they are.

    Args:
        quantise_on: the device on which weights are quantised that stay on the CPU; None: where they stay.
    """
    config: Any = BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=[*get_keys_to_not_convert(meta_model), *kept_out_of_4_bit(meta_model)],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )
    config.quant_method, config.quantise_on = _NAME, quantise_on
    return config


class _Quantizer(Bnb4BitHfQuantizer):
    """transformers' quantiser of linear modules, which quantises fused experts too."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return super().param_needs_quantization(model, param_name, **kwargs) or name in packable(module)

    def get_quantize_ops(self) -> Any:
        from transformers.integrations.bitsandbytes import Bnb4bitQuantize  # it imports bitsandbytes, maybe broken

        class Quantise(Bnb4bitQuantize):
            def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
                config: Any = self.hf_quantizer.quantization_config
                packed: dict[str, Any] = {}
                for name, value in input_dict.items():
                    weight = value[0] if isinstance(value, list) else value
                    if config.quantise_on:
                        weight = weight.to(config.quantise_on)
                    module, own_name = get_module_from_name(kwargs["model"], name)
                    if own_name in packable(module) and weight.dim() == 4:  # MXFP4, see ``dequantising``
                        packed[name] = weight.to(torch.uint8)
                    elif own_name in packable(module):
                        packed[name] = _params_4bit(weight, config.bnb_4bit_quant_storage).to(weight.device)
                    else:
                        packed |= super().convert({name: weight}, *args, **kwargs)
                return {name: each.to("cpu") if config.quantise_on else each for name, each in packed.items()}

        return Quantise(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        install_packed(model, config.bnb_4bit_quant_storage)
        if torch.device(config.quantise_on or "cpu").type == "cuda":
            torch.cuda.empty_cache()  # else shards, which stay, would lie in the blocks of whole matrices
        return super()._process_model_after_weight_loading(model, **kwargs)


AUTO_QUANTIZER_MAPPING[_NAME] = _Quantizer


def _params_4bit(weight: torch.Tensor, storage: torch.dtype, **options: Any) -> Any:
    """A parameter of NF4 with double quantisation, stored in ``storage``; quantised once it is moved to a device."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(weight, quant_type="nf4", quant_storage=storage, **options)


def quantised_on_meta(meta_model: Any, compute_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a copy of a model on meta with ``Linear4bit`` and ``PackedExperts`` where ``qlora`` would quantise.

    Their weights keep the shapes that they had; ``packed_on_meta`` packs them.
    """
    quantised = copy.deepcopy(meta_model)
    quantizer = AutoHfQuantizer.from_config(four_bit_config(compute_dtype, meta_model), pre_quantized=False)
    quantizer.preprocess_model(model=quantised, device_map=None)
    quantizer.postprocess_model(quantised)
    return quantised


def packed_on_meta(meta_model: Any, compute_dtype: torch.dtype, in_mxfp4: bool = False) -> Any:
    """Return a copy of a model on meta in the form in which ``qlora`` loads it, 4-bit weights packed, with tables.

    Args:
        in_mxfp4: whether the files hold the experts in MXFP4.
    """
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit

    # It keeps this table for the process. The first weight would put it on meta.
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    model = quantised_on_meta(meta_model, compute_dtype)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if in_mxfp4 and isinstance(child, PackedExperts):
                number, rows, columns = child.shape
                groups = torch.empty(number, columns, rows // GROUP, GROUP_BYTES, dtype=torch.uint8, device="meta")
                setattr(module, name, Mxfp4Experts(groups, compute_dtype))
    for module in model.modules():
        if isinstance(module, Linear4bit | PackedExperts) and not isinstance(module, Mxfp4Experts):
            # Not in the weight: a state dict would read a value of the tables. A forward pass finds them in the module.
            packed, module.quant_state = functional.quantize_4bit(
                module.weight.data.to(compute_dtype),
                compress_statistics=True,
                quant_type="nf4",
                quant_storage=compute_dtype,
            )
            module.weight = _params_4bit(packed, compute_dtype, bnb_quantized=True, module=module)
    return model
