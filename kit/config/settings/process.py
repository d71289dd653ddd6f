"""Settings of the processes of a run: NaN/Inf, replicas, seed, precision of matmuls, time-outs."""

from functools import partial
from typing import Literal

from pydantic import BaseModel

from kit.schema.fields import STRICT, option

_option = partial(option, "Process")
_identity = partial(option, "Process", identity=True)


class ProcessSettings(BaseModel):
    """How the processes of a run compute, and what they monitor."""

    model_config = STRICT

    max_nonfinite_steps: int = _option(
        0, "skip up to N steps in a row whose loss or gradient is NaN/Inf; one more stops the run", "steps", ge=0
    )
    loss_spike_ratio: float = _option(
        0.0, "report the samples of a loss spike: above N times the median of the last 50 losses; 0: off", ge=0
    )
    check_replicas: int = _option(
        0, "verify that data-parallel replicas are bit-identical every N steps; 0: never", "steps", ge=0
    )
    seed: int = _identity(42, "seed of data order, initialisation of adapters, and dropout", ge=0, lt=2**31)
    tf32: bool | None = _option(None, "use TF32 for float32 matmuls on a GPU; default: only with mixed_precision bf16")
    torch_compile: bool | Literal["auto"] = _option(
        "auto", "compile the decoder layers with torch.compile; auto: on NVIDIA GPUs from Ampere on, in long runs"
    )
    deterministic: bool = _option(False, "deterministic kernels on a GPU: bit-exact reruns, slower")
    ddp_timeout: int = _option(1800, "abort if a rank makes no progress for this long", "seconds", ge=10)
