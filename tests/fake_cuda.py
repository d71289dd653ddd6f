"""CUDA without CUDA: builds and loads ``fake_cuda.cpp``, and stubs what torch's Python layer asks of a CUDA runtime.

``load`` must be called before torch is imported; ``stub_runtime`` after bitsandbytes is, which would look for its
kernels. Both change this process for good, so they belong in a process of their own.
"""

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NUM_DEVICES = 8
NAME = "fake GPU"
MEMORY_BYTES = 80 * 2**30
_libraries: list[Any] = []  # what is registered ends with them


def compiler() -> str | None:
    """The C++ compiler; None if there is none."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Compile the library for the installed torch into ``folder``, unless it is there; some 15 s."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    version = (torch / "version.py").read_bytes()
    library = folder / f"lib{source.stem}-{hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]}.so"
    if not library.exists():
        found = compiler()
        assert found, "no C++ compiler: install g++ or clang++"
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        libraries = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
        partial = library.with_suffix(".partial")
        command = [found, "-std=c++20", "-O1", "-fPIC", "-shared", *includes, str(source), *libraries, "-o", partial]
        subprocess.run(command, check=True)
        partial.rename(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load the library. Call this before torch is imported: torch looks for a device's hooks once."""
    assert "torch" not in sys.modules, "torch is already imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    ctypes.CDLL(f"{spec.submodule_search_locations[0]}/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def stub_runtime(waited: Callable[[str], None], pinned: Callable[[int], None]) -> None:
    """Replace torch's Python layer over the CUDA runtime: devices, streams, events, memory statistics, generators.

    Args:
        waited: called with the name of each function by which the host waits for the device.
        pinned: called with the address of memory that is pinned in place.
    """
    import torch

    class Quiet:
        """A stream or an event, of which there is one."""

        stream_id = device_index = 0
        device_type = 1

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.device = torch.device("cuda", 0)

        def _done(self, *args: Any) -> Any:
            return self

        record = record_event = wait = wait_event = wait_stream = __enter__ = __exit__ = _done

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited(f"{type(self).__name__}.synchronize")

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    class Event(Quiet):
        pass

    class Stream(Quiet):
        def __exit__(self, *args: Any) -> None:
            pass

    current = Stream()
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=132, gcnArchName=""
    )

    @contextmanager
    def on_stream(stream: Any) -> Any:
        yield stream

    def register(address: int, num_bytes: int, flags: int) -> int:
        pinned(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    memory = {"memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "memory_stats": {}}
    memory |= {"reset_peak_memory_stats": None, "empty_cache": None, "current_stream": current, "set_stream": None}
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: memory
        | {
            "cudart": runtime,
            "is_available": True,
            "is_initialized": True,
            "init": None,
            "_lazy_init": None,
            "_lazy_call": None,
            "device_count": NUM_DEVICES,
            "current_device": 0,
            "set_device": None,
            "device": nullcontext(),
            "get_device_name": NAME,
            "get_device_capability": (9, 0),
            "get_device_properties": properties,
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "manual_seed": None,
            "manual_seed_all": None,
            "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
            "set_per_process_memory_fraction": None,
            "default_stream": current,
        },
        torch.accelerator: memory
        | {
            "is_available": True,
            "current_accelerator": torch.device("cuda"),
            "device_count": NUM_DEVICES,
            "current_device_index": 0,
            "set_device_index": None,
            "set_device_idx": None,
            "get_memory_info": (MEMORY_BYTES, MEMORY_BYTES),
        },
    }
    for module, values in answers.items():
        for name, value in values.items():
            setattr(module, name, lambda *_, value=value, **__: value)
        name = f"{module.__name__}.synchronize"
        module.synchronize = lambda device=None, name=name: waited(name)
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, on_stream  # type: ignore[assignment, misc]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    # A CPU-only torch has no kernel of CUDA for this, and would take it apart into others that hold more.
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu_backward", lambda *args: NotImplemented, "CUDA")
    _libraries.append(library)
