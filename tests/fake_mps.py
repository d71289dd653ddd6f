"""A Mac without a Mac: runs a script on an imitation of Apple's GPU, whose operators compute on the CPU.

    python tests/fake_mps.py recipes/finetune.py --config single --output_dir runs/mac

Losses are real, and the device is "mps" to all of Python. Like MPS, it has no float64, and refuses tensors of two
devices in one operator. With FAKE_MPS_REPORT=FILE, the operators that came to the device, how often the host waited for
it, and those of the operators for which torch has no MPS kernel, are written to FILE as JSON at the end.

It cannot show: speed, memory, rounding of Metal's kernels, faults of these kernels, and kernels that refuse a shape or
a dtype other than float64.
"""

import atexit
import ctypes
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fake_cuda
from filelock import FileLock

SOURCE = Path(__file__).with_name("fake_mps.cpp")


def without_kernel(operators: list[str]) -> list[str]:
    """Those of ``operators`` for which the installed torch has no MPS kernel, by its own table of kernels."""
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__path__[0]) / "packaged/ATen/native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    index = parsed.backend_indices[DispatchKey.MPS]
    kernels = {f"aten::{name}" for name in index.index}
    for function in parsed.native_functions:
        if function.structured_delegate in index.index:
            kernels.add(f"aten::{function.func.name}")
    return [name for name in operators if name not in kernels]


def _report(library: ctypes.CDLL, path: str) -> None:
    library.fake_mps_operators.restype = ctypes.c_char_p
    library.fake_mps_waits.restype = ctypes.c_int64
    operators = library.fake_mps_operators().decode().split()
    found = {"operators": operators, "waits": library.fake_mps_waits(), "without_kernel": without_kernel(operators)}
    Path(path).write_text(json.dumps(found))


def _open_on_cpu() -> None:
    """Let safetensors read to the CPU: its way to MPS asks for the buffers of Metal."""
    import safetensors
    import torch

    plain = safetensors.safe_open

    def safe_open(*args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return plain(*args, device="cpu" if torch.device(device).type == "mps" else device, **kwargs)

    safetensors.safe_open = safe_open  # type: ignore[assignment, misc]


def main() -> None:
    folder = Path(os.environ.get("FAKE_MPS_FOLDER", tempfile.gettempdir()))
    with FileLock(folder / "fake_mps.lock"):
        built = fake_cuda.build(folder, SOURCE)
    library = fake_cuda.load(built)
    import torch

    torch._C._has_mps = True  # type: ignore[misc]
    _open_on_cpu()
    if report := os.environ.get("FAKE_MPS_REPORT"):
        atexit.register(_report, library, report)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
