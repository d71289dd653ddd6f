"""Measure a run without a GPU: the kit's own code in a process of its own, on tensors without values.

The process is ``benchmarks.simulation.fake_run``. Its tensors are torch's fake ones on the CPU device, so it needs no
compiler, no CUDA and no weights, only a config.json. Attention takes kernels that hold what CUDA's hold. A GPU also has
CUDA's context, gaps of the allocator, workspaces of kernels and buffers of NCCL.

Promises: the caller's process stays as it is; the child ends at the deadline. Imports no torch.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.config.paths import ACCELERATE_CONFIGS
from kit.memory.workload import Workload
from kit.strategy.accelerate_config import read_config
from kit.strategy.strategies import SINGLE
from kit.strategy.topology import Topology
from kit.system.console import show_error
from kit.system.errors import TrainingError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What rank 0 asks of its GPU in a step, counted while the step ran."""

    components: dict[str, int]  # bytes at the peak, largest first, by the names of ``kit.memory.formulas.TENSORS``
    saved: dict[str, int]  # the same just before the backward pass
    collectives: dict[str, int]  # number of calls in a step, by operation
    collective_bytes: dict[str, int]  # of the buffers of those calls, by operation
    flops: int  # of matrix products and attention in a step, those of recomputed layers included
    launches: int  # of kernels in a step
    waits: int  # of the host for a number of the GPU in a step
    elementwise_bytes: int  # that all but matrix products and attention read and write in a step
    product_sizes: list[tuple[int, int]]  # flops and bytes of each product and attention of the first micro-batch
    seconds: float  # that the simulation took

    @property
    def tensors(self) -> int:
        """Bytes of all tensors at the peak: what ``Memory.tensors`` predicts."""
        return sum(self.components.values())


def simulate(workload: Workload, *, deadline_seconds: float = 300) -> Simulated:
    """Run a step of ``workload`` on fake tensors. Progress goes to standard error.

    It is the step of the objective: of pairs, of answers with a label, and with the reference's passes. It has one
    micro-batch, and finds the optimiser's state and the gradients that others have left. If the workload's has several,
    a step of two follows: what it has more is what each further one adds. Where micro-batches differ, as under DDP and
    hybrid sharding, whose last one adds up the copies' gradients, the peak is that of two.

    Raises:
        ValueError: the workload cannot be simulated.
        TrainingError: the run failed, or took longer than ``deadline_seconds``.
    """
    if workload.shape.folder is None:
        raise ValueError(f"{workload.shape.name} has no config.json")
    if workload.strategy.offloads and workload.method == "qlora":  # these tensors stay on the GPU
        raise ValueError("the scales of 4-bit weights that are offloaded would count as the host's")
    if workload.fuses:
        raise ValueError("what a graph keeps is decided by a compiler for the GPU")
    assert workload.loss == "chunks" and workload.pure_bf16 == (workload.optim == "adamw_bf16")
    # Whether a step of one micro-batch shows the peak. With sharded weights the first micro-batch after passes without
    # gradients finds embedding and head gathered.
    same = workload.strategy == SINGLE or (
        workload.sharded
        and workload.sync_each_batch is not False
        and workload.num_replicas == 1
        and not workload.passes
    )
    request = {
        "recipe": _settings(workload),
        "topology": asdict(_topology(workload)),
        "gpus_per_machine": workload.gpus_per_machine,
        "device_memory": workload.device_memory,
        "image_tokens": workload.image_tokens,
        "primes": same,
        "accumulates": workload.micro_batches > 1,
        "steps": [1] if workload.micro_batches == 1 and same else [1, min(2, workload.micro_batches)],
    }
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.simulation.fake_run"]
    show_error("simulation: started; the imports alone take some seconds")
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=deadline_seconds,
        )
    except subprocess.TimeoutExpired:
        raise TrainingError(f"the simulation took longer than {deadline_seconds:g} s") from None
    if done.returncode or not done.stdout:
        raise TrainingError(f"the simulation ended with status {done.returncode}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise TrainingError(f"the simulation failed: {answer['error']}")
    one, last = answer["steps"][0], answer["steps"][-1]

    peak = one if same else last

    def whole(first: int, second: int) -> int:
        """What a step of all micro-batches has of what one has, or two: each further one adds the same."""
        return first + (workload.micro_batches - 1) * (second - first)

    return Simulated(
        components=peak["components"]["cpu"],
        saved=peak["moments"]["cpu"]["backward"],
        collectives={
            name: whole(count, last["collectives"].get(name, 0)) for name, count in one["collectives"].items()
        },
        collective_bytes={
            name: whole(size, last["collective_bytes"].get(name, 0)) for name, size in one["collective_bytes"].items()
        },
        **{name: whole(one[name], last[name]) for name in ("flops", "launches", "waits", "elementwise_bytes")},
        product_sizes=one["product_sizes"],
        seconds=time.perf_counter() - began,
    )


def _settings(workload: Workload) -> dict[str, Any]:
    """The recipe of the simulated run, as JSON."""
    return {
        "model_name_or_path": str(workload.shape.folder and workload.shape.folder.resolve()),
        "dataset": "random",
        "method": workload.method,
        "fp8": workload.fp8,
        "max_length": workload.length,
        "packing": workload.packing,
        "per_device_train_batch_size": workload.rows,
        "global_batch_size": workload.rows * workload.num_data_ranks * workload.micro_batches,
        "gradient_checkpointing": workload.gradient_checkpointing,
        "activation_offload": workload.activation_offload,
        "tiled_mlp": workload.tiled_mlp,
        "objective": workload.objective,
        "teacher": workload.teacher and str(workload.teacher.folder.resolve()),
        "teacher_in_4bit": workload.teacher_in_4bit,
        "precompute_reference": workload.declared.has_reference and workload.precompute_reference,
        "lora_r": workload.lora_r,
        "lora_target_modules": list(workload.lora_targets or ()) or "all-linear",
        "optim": workload.optim,
        "attn_implementation": "eager" if workload.eager else "auto",
        "sync_each_batch": workload.sync_each_batch,
        "train_only": list(workload.trained_parts) if "vision" in workload.trained_parts else None,
    }


def _topology(workload: Workload) -> Topology:
    """The topology of the simulated run, as the Accelerate config of the strategy says, on the CPU device."""
    settings = read_config(ACCELERATE_CONFIGS / f"{workload.config}.yaml")
    return Topology(
        strategy=workload.strategy,
        config_name=workload.config,
        num_processes=workload.num_gpus,
        mixed_precision=workload.mixed_precision,
        device_type="cpu",
        cpu_dry_run=True,
        layer_classes=settings.layer_classes,
        reshard_after_forward=settings.reshard_after_forward,
        num_replicas=workload.num_replicas,
        sequence_parallel_size=workload.sequence_parallel_size,
    )


def set_rank_0_variables(world: int, local_world: int) -> None:
    """Set what a launcher sets for rank 0, in a process that simulates one of ``world`` ranks."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(min(world, local_world)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
