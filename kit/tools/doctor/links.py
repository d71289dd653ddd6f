"""How long a step's collectives of the planned run take at the rate that the ranks measured, and how long its products.

Promises: it is an estimate by the formulas of the plan, and a warning at most. Without formulas for a model it says so.
"""

import time
from dataclasses import replace

import torch

from kit.config.recipe import Recipe
from kit.memory.fit import planned_workload, resolve_auto
from kit.memory.operations import operations_per_token
from kit.model.load import open_config
from kit.strategy.topology import Topology
from kit.tools.doctor.result import Result, ok
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.speed import collective_seconds

FAR_BEYOND = 2.0  # times as long as the products
_FIXES = {
    True: "a larger per_device_train_batch_size gathers less often, --config fsdp_hybrid within a machine only",
    False: "--method lora exchanges gradients of adapters only",
}


def check_step(recipe: Recipe, topology: Topology, device: torch.device, latency: float, rate: float) -> Result:
    """Estimate the collectives of a step, and compare them with its matrix products. Called by one rank.

    Args:
        latency: seconds of an all-reduce of few bytes.
        rate: bytes per second of a large all-reduce, as nccl-tests count them.
    """
    config = open_config(recipe)
    workload = planned_workload(resolve_auto(recipe, topology, config), topology, config)
    if workload is None or workload.strategy.replicates:
        return ok("a step", "its communication is not estimated: there is no formula for this run")
    link = Gpu(name="measured", memory=0, link=rate, network=rate)
    # A step ends with two small all-reduces at least: sums of the loss, and the gradient norm or the last bucket.
    sending = collective_seconds(replace(workload, gpus_per_machine=workload.num_gpus), link) + 2 * latency
    operations = workload.tokens * workload.micro_batches * operations_per_token(workload, 1.0, None)
    computing = operations / _operations_per_second(device, torch.bfloat16 if workload.bf16 else torch.float32)
    found = (
        f"collectives take about {sending:.3g} s of each step at this rate, matrix products at least {computing:.3g} s"
    )
    if sending <= FAR_BEYOND * computing:
        return ok("a step", found)
    fix = (
        _FIXES[workload.sharded] if workload.sharded or recipe.method == "full" else "a faster network, or fewer ranks"
    )
    return Result("a step", "warn", f"{found}: the network decides how fast it trains", fix)


def _operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """What products of large matrices reach on this device."""
    size = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(4):  # the first one loads kernels
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest
