"""A CUDA device for tensors without values, in a torch without CUDA: enough to compile graphs for it. Nothing runs.

It changes torch in its process for good.
"""

import ctypes
import importlib.util
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def fake_cuda() -> None:
    """Show an H100 to torch, which must not be imported yet. Needs ``g++``."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.submodule_search_locations
    torch_folder = spec.submodule_search_locations[0]
    with tempfile.TemporaryDirectory() as folder:
        library, include = f"{folder}/fake_cuda.so", f"{torch_folder}/include"
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        source = str(Path(__file__).with_suffix(".cpp"))
        subprocess.run(
            ["g++", *options, source, f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", "-o", library], check=True
        )
        for each in (f"{torch_folder}/lib/libtorch_cpu.so", library):
            ctypes.CDLL(each, mode=ctypes.RTLD_GLOBAL)
    import bitsandbytes  # noqa: F401  before CUDA seems to be there: it would look for its kernels
    import torch
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm

    card: Any = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, warp_size=32)
    card.regs_per_multiprocessor, card.max_threads_per_multi_processor, card.max_threads_per_block = 65536, 2048, 1024
    card.total_memory, card.gcnArchName = 80 << 30, ""
    answers = {
        torch.cuda: {
            **{"is_available": True, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0)},
            **{"is_initialized": True, "_lazy_init": None, "synchronize": None, "get_device_properties": card},
            **{"get_rng_state": torch.empty(0), "set_rng_state": None, "_exchange_device": 0},
            "current_stream": SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1),
        },
        torch._C: dict.fromkeys(("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_getCurrentRawStream"), 0),
        CudaInterface: {
            **{"is_available": True, "get_compute_capability": 90, "is_triton_capable": True, "current_device": 0},
            **{"get_device_properties": card, "raise_if_triton_unavailable": None, "get_raw_stream": 0},
        },
        CudaInterface.Worker: {"get_device_properties": card, "current_device": 0},
        torch.utils._triton: {"triton_hash_with_backend": ""},
        # These compute on the device, to find patterns that no layer here has.
        fuse_attention: {"_sfdp_init": None},
        **{pad_mm: {"_pad_mm_init": None}, misc_patterns: {"_misc_patterns_init": None}},
        joint_graph: {"constant_fold_uniform_value": None},
    }
    for owner, values in answers.items():
        for name, value in values.items():
            setattr(owner, name, staticmethod(lambda *_, value=value, **__: value))
    torch.cuda._maybe_exchange_device = lambda device: 0  # type: ignore[assignment]  # the compiler tells the two apart

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **options: Any
    ) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(q, k, v, p, causal, scale=options.get("scale"))[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    vars(torch)["_kept"] = library
