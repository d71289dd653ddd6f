"""Compare quantised bases as the kit reads them with the dequantisation of the library that made them.

    python benchmarks/quantised_bases.py FOLDER ...

Each folder is a model of GPTQModel (GPTQ), AutoAWQ (AWQ) or compressed-tensors, whose library must be installed. A line
says by how much weights and logits differ, in float32, and whether the weights are equal in the library's own dtype.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kit.config.recipe import Recipe
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan

Tensors = dict[str, torch.Tensor]
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def by_gptqmodel(folder: Path, _: Any) -> Tensors:
    """By the module of GPTQModel that computes with torch; zero points of the first format are converted by it."""
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model
    weights = {name: each for name, each in load_file(folder / "model.safetensors").items() if not name.endswith(PARTS)}
    for name, module in model.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales, module.dequant_dtype = torch.nn.Buffer(module.scales.float()), torch.int32
            weights[f"{name}.weight"] = module.dequantize_weight().float().T.contiguous()
    return weights


def by_autoawq(folder: Path, quantisation: dict[str, Any]) -> Tensors:
    """By the function that AutoAWQ uses without its kernels, with scales in float32."""
    from awq.utils.packing_utils import dequantize_gemm

    files = load_file(folder / "model.safetensors")
    weights = {name: each for name, each in files.items() if not name.endswith(PARTS)}
    for name in [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]:
        words, zeros, scales = (files[f"{name}.{part}"] for part in PARTS[:3])
        weights[f"{name}.weight"] = dequantize_gemm(words, zeros, scales.float(), 4, quantisation["group_size"]).T
    return weights


def by_compressed_tensors(folder: Path, quantisation: dict[str, Any]) -> Tensors:
    """By the library's compressor of the only group, in the dtype of the scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(quantisation).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or quantisation["format"])
    weights = load_file(folder / "model.safetensors")
    for stem in [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]:
        module = stem.removesuffix("weight")
        parts = {name.removeprefix(module): weights.pop(name) for name in list(weights) if name.startswith(module)}
        weights[stem] = compressor.decompress(parts, scheme)["weight"]
    return weights


LIBRARIES = {"gptq": by_gptqmodel, "awq": by_autoawq, "compressed-tensors": by_compressed_tensors}


def main() -> None:
    """Print a line for each folder."""
    for folder in map(Path, sys.argv[1:]):
        quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
        theirs = LIBRARIES[quantisation["quant_method"]](folder, quantisation)
        settings = Recipe(model_name_or_path=str(folder), dataset="none", max_length=64, method="full")
        model = build_model(settings, open_config(settings), LoadPlan(compute_dtype="float32", device="cpu")).eval()
        ours = model.state_dict()
        difference = max((ours[name].float() - each.float()).abs().max().item() for name, each in theirs.items())
        is_equal = all(torch.equal(ours[name].to(each.dtype), each) for name, each in theirs.items())
        ids = torch.randint(5, 500, (2, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found = model(input_ids=ids).logits
            model.load_state_dict({name: each.float() for name, each in theirs.items()}, strict=False)
            logits = (model(input_ids=ids).logits - found).abs().max().item()
        print(
            f"{folder.name}: weights {difference:.1e}, equal in their dtype: {is_equal}, logits {logits:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
