"""What the devices can do: the driver, GPUs and their memory, bf16, fp8, a 4-bit product, attention.

Each check computes something small on the device that the run would use, and compares it with float32 on the CPU.
"""

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe
from kit.console import silence_libraries
from kit.errors import Problem, UserError, first_line, raise_if
from kit.memory.needs import RunNeeds
from kit.memory.sizes import format_bytes
from kit.strategy.kernels import check_kernels
from kit.strategy.precision import check_precision, describe_precision
from kit.strategy.topology import Topology
from kit.tools.doctor.result import Result, of_problems, ok

_NVIDIA = "/proc/driver/nvidia/version"
# Largest relative errors (Frobenius norm): bf16 keeps 8 bits, e4m3 keeps 4, NF4 of normally distributed weights is 9 %
# off.
_BF16_ERROR, _FP8_ERROR, _NF4_ERROR = 0.02, 0.06, 0.15
# What a device has beside the run's state: CUDA's context, and activations, at the very least.
_TIGHT = 0.8


def check_driver(topology: Topology) -> Result:
    """Fail if this machine has NVIDIA GPUs that torch cannot use."""
    build = f"torch {torch.__version__}"
    if topology.device_type == "mps":
        return ok("driver", f"{build} reaches the Mac's GPU (MPS)")
    if topology.device_type != "cpu":
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        runtime = runtime if topology.device_type == "cuda" else topology.device_type
        return ok("driver", f"{build} for {runtime} reaches {torch.accelerator.device_count()} GPUs{_driver()}")
    if not os.path.exists(_NVIDIA):
        return ok("driver", f"no NVIDIA driver, and {build}: runs on the {topology.device_type.upper()}")
    if torch.cuda.is_available():
        return ok("driver", f"{build}{_driver()}; the config asks for the CPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
        found = "no GPU is visible"
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        found = str(error).splitlines()[0]
    fix = "`nvidia-smi` must list them, CUDA_VISIBLE_DEVICES not hide them, and the driver know torch's CUDA"
    return Result("driver", "fail", f"{build}{_driver()}: {found}", fix)


def _driver() -> str:
    try:
        with open(_NVIDIA, encoding="utf-8") as file:
            words = file.readline().split("Kernel Module")[-1].split()
        return f", driver {next(word for word in words if word[0].isdigit())}"
    except (OSError, StopIteration):
        return ""


def check_gpus(topology: Topology, needs: RunNeeds | None, local_world: int, refused: Sequence[Problem] = ()) -> Result:
    """Fail if a GPU is too small for weights, gradients and optimiser state; warn if a run meant for GPUs has none.

    Args:
        needs: of a model of any family; None if it could not be opened.
        refused: why the run would be refused by the plan, which knows activations too, but not all families.
    """
    if topology.device_type == "cpu":
        if topology.rehearsal:
            fix = "this rehearses the run; train on a machine with GPUs"
            return Result("GPUs", "warn", f"none: {topology.config_name} runs on the CPU", fix)
        return ok("GPUs", "none: the run takes the CPU")
    names, memory = [], []
    if topology.device_type == "mps":
        names, memory = ["MPS"], [torch.mps.recommended_max_memory()]  # of the memory that it shares with the CPU
    for index in range(local_world if not names else 0):
        properties = torch.get_device_module(topology.device_type).get_device_properties(index)
        names.append(properties.name)
        memory.append(int(properties.total_memory))
    found = f"{len(names)} x {'/'.join(dict.fromkeys(names))} of {format_bytes(min(memory))}"
    if len(set(names)) > 1 or max(memory) > 1.1 * min(memory):
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES"
        return Result("GPUs", "warn", f"{found}: they differ, and all wait for the slowest", fix)
    if refused:
        return of_problems("GPUs", refused, found)
    if needs is None:
        return ok("GPUs", found)
    found += f"; weights, gradients and optimiser take {format_bytes(needs.device)} of each, activations come on top"
    fix = "--method lora or qlora, --config fsdp or fsdp_offload, more GPUs"
    if needs.device > min(memory):
        return Result("GPUs", "fail", found, fix)
    if needs.device > _TIGHT * min(memory):
        return Result("GPUs", "warn", found, f"--gradient_checkpointing true, a smaller micro-batch; or {fix}")
    return ok("GPUs", found)


def check_bf16(topology: Topology, config: str | None, method: str) -> Result:
    """Fail if the config asks for bf16 and a product in it is wrong, or does not exist; warn of float32 on a GPU.

    Args:
        config: as the command names it; None without one.
    """
    if problems := check_precision(topology):
        return of_problems("bf16", problems, "")
    if lines := describe_precision(topology, config, method):
        return Result("bf16", "warn", "; ".join(lines))
    if topology.mixed_precision != "bf16":
        return ok("bf16", "not asked for by the config")
    left, right = _random(0, 256, 256), _random(1, 256, 256)
    product = left.to(topology.device_type, torch.bfloat16) @ right.to(topology.device_type, torch.bfloat16)
    return _compared("bf16", "a product", _error(product, left @ right), _BF16_ERROR, "install torch again")


def check_fp8(recipe: Recipe, topology: Topology) -> Result:
    """Fail if the run cannot have ``fp8``, or a product of 8 bits is wrong."""
    from kit.model.fp8_linear import product

    if problems := [problem for problem in check_kernels(recipe, topology) if problem.where == "fp8"]:
        return of_problems("fp8", problems, "")
    left, right = (_random(seed, 256, 256) for seed in (0, 1))
    found = product(*(matrix.to(topology.device_type, torch.bfloat16) for matrix in (left, right)))
    return _compared("fp8", "a product", _error(found, left @ right.t()), _FP8_ERROR, "install torch again")


def check_four_bit(method: str, optim: str, device: str) -> Result:
    """Quantise a matrix, multiply by it, and compare. It fails a run that needs bitsandbytes, and only warns others."""
    silence_libraries()
    name = "4-bit product"
    needed = method == "qlora" or bool(OPTIMISERS[optim].bitsandbytes)
    if find_spec("bitsandbytes") is None and not needed:
        return ok(name, "bitsandbytes is not installed, and not needed")
    try:
        import bitsandbytes
        from bitsandbytes.functional import quantize_4bit

        weight, inputs = _random(0, 64, 256), _random(1, 8, 256)
        quantised, state = quantize_4bit(weight.to(device), quant_type="nf4", compress_statistics=True)
        product = bitsandbytes.matmul_4bit(inputs.to(device), quantised.t(), quant_state=state)
        fix = "`python -m bitsandbytes` says what it misses; then install it again"
        result = _compared(name, f"bitsandbytes {bitsandbytes.__version__}", _error(product, inputs @ weight.t()),
                           _NF4_ERROR, fix)  # fmt: skip
    except Exception as error:  # a library of CUDA that is missing or of another version raises many types
        reason = first_line(error)
        fix = "`python -m bitsandbytes` says what it misses; then install it again"
        result = Result(name, "fail", f"bitsandbytes is installed but broken ({reason})", fix)
    if result.status == "fail" and not needed:
        return Result(name, "warn", f"{result.found}; this recipe does not need it", result.fix)
    return result


def check_attention(settings: Recipe, packing: bool, config: Any, topology: Topology) -> Result:
    """Try each attention backend, and report which one the run takes; fail if the recipe asks for one that fails.

    Args:
        config: of the model; None if it could not be opened.
    """
    # transformers takes seconds
    from kit.model.attention import VARLEN, has_kernel, packed_kernel, use_flash_attention_3
    from kit.model.load import attention_of

    if settings.attn_implementation == "flash_attention_3":
        try:
            raise_if(check_kernels(settings, topology))
            use_flash_attention_3()
        except UserError as error:
            return of_problems("attention", error.problems, "")
    device = topology.device_type
    dtype = torch.bfloat16 if topology.mixed_precision == "bf16" else torch.float32
    query = _random(0, 1, 4, 32, 64).to(device, dtype)  # [batch, heads, tokens, head size]
    works = [name for name, attend in _BACKENDS.items() if _runs(attend, query)]
    found = f"{', '.join(works)} run on {device} in {str(dtype).removeprefix('torch.')}"
    if config is None:
        return ok("attention", found)
    taken = attention_of(settings, config, packing)
    if taken == VARLEN:
        backend, taken = "varlen" if has_kernel(query[0]) else "", packed_kernel(query[0])
    else:
        backend = {"flash_attention_2": "flash_attn package", "flex_attention": "flex"}.get(taken, taken)
    if backend in _BACKENDS and backend not in works:
        return Result("attention", "fail", f"{backend} does not run here; {found}", "--attn_implementation auto")
    return ok("attention", f"{found}; the run takes {taken}")


def _sdpa(backend: SDPBackend) -> Any:
    def attend(query: torch.Tensor) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    return attend


def _varlen(query: torch.Tensor) -> Any:
    from kit.model.attention import has_kernel, varlen_attention

    if not has_kernel(query):
        raise RuntimeError("no kernel for this device and dtype")
    bounds = torch.tensor([0, 10, query.shape[2]], dtype=torch.int32, device=query.device)
    return varlen_attention(torch.nn.Module(), query, query, query, None, cu_seq_lens_q=bounds, max_length_q=32)


def _flash_attn(query: torch.Tensor) -> Any:
    from flash_attn import flash_attn_func

    return flash_attn_func(query, query, query, causal=True)


def _flex(query: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        return flex_attention(query, query, query)


_BACKENDS = {
    "sdpa flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa math": _sdpa(SDPBackend.MATH),
    "varlen": _varlen,
    "flash_attn package": _flash_attn,
    "flex": _flex,
}


def _runs(attend: Any, query: torch.Tensor) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each says why it does not run
            attend(query)
        return True
    except Exception:  # no kernel for this device, dtype or build
        return False


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.cpu().float() - expected).norm() / expected.norm())


def _compared(name: str, what: str, error: float, tolerance: float, fix: str) -> Result:
    found = f"{what} is {error:.1%} off float32"
    if error <= tolerance:
        return ok(name, found)
    return Result(name, "fail", f"{found}, more than {tolerance:.0%}", fix)
