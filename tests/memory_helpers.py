"""Errors as allocators raise them, and what a run says of one."""

import pytest

from kit.config.recipe import Recipe
from kit.memory.out_of_memory import explain
from kit.strategy.strategies import DDP, SINGLE
from kit.strategy.topology import Topology
from kit.system.phases import TRAINING

GIB = 2**30
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4194304 bytes. Error code 12 (Cannot allocate memory)"
)
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.50 GiB is "
    "free. Process 12 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 47.75 GiB memory in "
    "use. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 6.25 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def make(**changes):
    plain = {"model_name_or_path": "some/model", "dataset": "some/data", "global_batch_size": 24}
    return Recipe(**plain | {"per_device_train_batch_size": 4, "max_length": 2048} | changes)


def placed(num_processes=1, strategy=None, device_type="cpu", **more):
    strategy = strategy or (SINGLE if num_processes == 1 else DDP)
    plain = {"config_name": strategy.config, "mixed_precision": "bf16"}
    return Topology(strategy=strategy, num_processes=num_processes, device_type=device_type, **plain, **more)


def message_of(error, model=None, optimizer=None, topology=None, phase=TRAINING, **changes):
    answer = explain(error, model, optimizer, phase, make(**changes), topology or placed())
    assert answer is not None and len(answer.problems) == 1
    return str(answer)


def raised(function, *args, **kwargs):
    """The error, with its traceback."""
    with pytest.raises(BaseException) as info:
        function(*args, **kwargs)
    return info.value


def fail(*_args, **_kwargs):
    raise RuntimeError(ON_CPU)
