"""GPUs as numbers: memory, arithmetic, and links, from public datasheets or from this machine's driver.

Nothing here was measured by this project.
"""

import math
import re
import subprocess
from dataclasses import dataclass, replace

from kit.memory.host import host_memory
from kit.system.errors import UserError

GB, GIB = 10**9, 2**30
# Bytes per second in one direction between GPUs of a machine, of the manufacturer's datasheets.
PCIE3, PCIE4, PCIE5 = 16 * GB, 32 * GB, 64 * GB
NVLINK2, NVLINK3, NVLINK4, NVLINK5 = 150 * GB, 300 * GB, 450 * GB, 900 * GB
INFINITY3 = 448 * GB  # of an MI300X: seven links of 64 GB/s
# Of one GPU to other machines: 400 Gbit/s per GPU is what DGX H100 and the clouds' machines with eight H100 have.
NETWORK = 50 * GB
_BF16_FROM = 8.0  # compute capability


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A model of GPU."""

    name: str
    memory: int  # bytes that CUDA reports as total, or that the user named
    # 10^12 operations per second, dense, sums in float32: of bf16, or of fp16 without it. None: unknown
    tflops: float | None = None
    bf16: bool = True  # else fp16 takes its place
    fp8: bool = True  # whether it may have 8-bit products; of one that is not in the table nothing is known
    bandwidth: float | None = None  # bytes per second of its memory
    link: float = PCIE4  # bytes per second in one direction to the other GPUs of the machine
    network: float = NETWORK  # bytes per second in one direction to other machines
    host: float = math.inf  # bytes of memory of the machine that it is in; infinite: unknown

    @property
    def is_known(self) -> bool:
        """Whether its speed is known."""
        return self.tflops is not None


def _gpu(
    name: str,
    gib: float,
    tflops: float,
    gigabytes_per_second: float,
    link: float = PCIE4,
    bf16: bool = True,
    fp8: bool = True,
) -> Gpu:
    bandwidth = gigabytes_per_second * GB
    memory = int(gib * GIB)
    return Gpu(name=name, memory=memory, tflops=tflops, bf16=bf16, fp8=fp8, bandwidth=bandwidth, link=link)


# Memory: what CUDA reports, which is less than the name says: ECC and the driver take some. Arithmetic and bandwidth:
# NVIDIA's datasheets and architecture whitepapers (GA102, AD102, GB202: "BF16 Tensor TFLOPS with FP32 Accumulate"); of
# those without bf16 that of fp16: "mixed precision" of the datasheet of Tesla T4, "tensor performance" of that of V100,
# "with FP32 accumulate" of the RTX 2080 Ti's whitepaper (TU102); A10G: AWS's "70 TFLOPS" of tensor cores; of the MI300X
# AMD's datasheet.
GPUS = {
    "t4": _gpu("T4", 14.6, 65, 320, PCIE3, bf16=False, fp8=False),
    "v100": _gpu("V100 SXM2 16 GB", 15.7, 125, 900, NVLINK2, bf16=False, fp8=False),
    "v100-32": _gpu("V100 SXM2 32 GB", 31.7, 125, 900, NVLINK2, bf16=False, fp8=False),
    "v100-pcie": _gpu("V100 PCIe 16 GB", 15.7, 112, 900, PCIE3, bf16=False, fp8=False),
    "rtx2080ti": _gpu("RTX 2080 Ti", 10.7, 53.8, 616, PCIE3, bf16=False, fp8=False),
    "rtx3060": _gpu("RTX 3060 12 GB", 11.6, 25.5, 360, fp8=False),
    "rtx3090": _gpu("RTX 3090", 23.6, 71, 936, fp8=False),
    "rtx4060ti": _gpu("RTX 4060 Ti 16 GB", 15.6, 44, 288),
    "rtx4080": _gpu("RTX 4080", 15.6, 97.5, 717),
    "rtx4090": _gpu("RTX 4090", 23.6, 165.2, 1008),
    "rtx5080": _gpu("RTX 5080", 15.5, 112.6, 960, PCIE5),
    "rtx5090": _gpu("RTX 5090", 31.3, 209.5, 1792, PCIE5),
    "a10": _gpu("A10", 22.0, 125, 600, fp8=False),
    "a10g": _gpu("A10G", 22.0, 70, 600, fp8=False),
    "a40": _gpu("A40", 44.4, 149.7, 696, fp8=False),
    "a6000": _gpu("RTX A6000", 47.4, 154.8, 768, fp8=False),
    "rtx6000ada": _gpu("RTX 6000 Ada", 47.4, 364.2, 960),
    "rtxpro6000": _gpu("RTX PRO 6000 Blackwell", 94.9, 503.8, 1792, PCIE5),
    "l4": _gpu("L4", 22.0, 121, 300),
    "l40s": _gpu("L40S", 44.4, 362, 864),
    "a100-40": _gpu("A100 40 GB", 39.4, 312, 1555, NVLINK3, fp8=False),
    "a100": _gpu("A100 80 GB", 79.1, 312, 2039, NVLINK3, fp8=False),
    "h100-pcie": _gpu("H100 PCIe", 79.1, 756, 2000, PCIE5),
    "h100": _gpu("H100 SXM", 79.1, 989.4, 3350, NVLINK4),
    "h200": _gpu("H200 SXM", 139.7, 989.4, 4800, NVLINK4),
    "b200": _gpu("B200", 178.3, 2250, 8000, NVLINK5),
    "mi300x": _gpu("MI300X", 191.9, 1307.4, 5300, INFINITY3, fp8=False),
}
_UNITS = {"mb": 10**6, "gb": GB, "mib": 2**20, "gib": GIB}
# What people write around the part of a name that distinguishes it.
_AROUND = re.compile(r"[\s_-]|nvidia|geforce|tesla|rtx|amd|instinct|sxm\d?(?!\d)")


def parse_gpu(text: str) -> tuple[Gpu, int, int]:
    """Read ``--gpu``: the name of a GPU, a memory with its unit (``24GiB``), or both; how many may stand before it.

    Returns:
        The GPU, how many, and how many of them are in a machine, as ``parse_gpus`` has them.

    Raises:
        UserError: it is neither.
    """
    match = re.match(r"([1-9]\d*)\s*[xX×*]\s*", text)  # noqa: RUF001
    name = text[match.end() :] if match else text
    counts = parse_gpus(match[1] if match else "1")
    known = {_AROUND.sub("", key): gpu for key, gpu in GPUS.items()}
    if (plain := _AROUND.sub("", name.lower())) in known:
        return known[plain], *counts
    if match := re.search(r"\b(\d+(?:\.\d+)?)\s*([mg]i?b)\b", name.lower()):
        memory = int(float(match[1]) * _UNITS[match[2]])
        return _card(name, memory) or Gpu(name=name, memory=memory), *counts
    expected = f"a memory with its unit such as 24GiB, or one of {', '.join(GPUS)}"
    raise UserError("--gpu", f"no GPU {text!r}", expected)


def parse_gpus(text: str) -> tuple[int, int]:
    """Read ``--gpus``: ``8``, or machines times GPUs, ``2x8``. Returns all GPUs, and those of a machine.

    Without machines, up to eight are taken for one machine, and more for machines of eight.
    """
    match = re.fullmatch(r"([1-9]\d*)(?:[x×*]([1-9]\d*))?", text.strip().lower())  # noqa: RUF001
    if not match:
        raise UserError("--gpus", f"found {text!r}", "a number, or machines x GPUs such as 2x8")
    first, second = int(match[1]), int(match[2] or 0)
    total = first * (second or 1)
    return total, second or min(total, 8)


def this_machine() -> tuple[Gpu, int] | None:
    """Return the GPU of this machine and how many of it there are, as its driver reports; None without one.

    If the GPUs differ, the smallest one is returned, since all ranks need the same; without bf16, if one has none. It
    has the machine's memory too.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = re.findall(r"^(.+), *(\d+), *(\d+\.\d+)$", text, re.MULTILINE)
    if not rows:
        return None
    memory, name = min((int(mib) * 2**20, name) for name, mib, _ in rows)
    bf16 = all(float(capability) >= _BF16_FROM for *_, capability in rows)
    return replace(gpu_of(name, memory), bf16=bf16, host=host_memory()[0]), len(rows)


def gpu_of(name: str, memory: int) -> Gpu:
    """Return the GPU that a driver calls ``name``; its speed is unknown if it is none of ``GPUS``.

    Args:
        memory: bytes that the driver reports, which distinguish cards of one name.
    """
    return replace(_card(name, memory) or Gpu(name=name, memory=memory), name=name, memory=memory)


def _card(name: str, memory: int) -> Gpu | None:
    """The card of that name with about that memory; if several have it, the one of whose key most is in the name."""
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    near = [key for key, gpu in GPUS.items() if 0.8 * memory < gpu.memory < 1.25 * memory]
    like = [key for key in near if _AROUND.sub("", key.split("-")[0]) in words]
    whole = [key for key in like if key.replace("-", "") in words]
    key = max(whole, key=len) if whole else min(like, key=len, default=None)
    return GPUS[key] if key else None
