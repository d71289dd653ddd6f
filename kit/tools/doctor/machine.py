"""Checks of this machine: launch, driver, precision, hub, memory and disk. No weight is read.

Promises: if something cannot be checked (no model, or a run that the plan does not cover), a line reports that.
"""

import os
from dataclasses import replace
from typing import Any

import psutil
import torch
from huggingface_hub import constants

from kit.config.dataset_entry import DatasetEntry
from kit.config.settings.model import ModelSettings
from kit.data.read.hub_datasets import ask_hub
from kit.data.read.sources import hub_id
from kit.hub.hub_errors import cached, not_cached
from kit.memory.fit import check_disk, memory_problems, planned_workload, resolve_auto
from kit.memory.formulas import predict
from kit.memory.host import host_memory
from kit.memory.sizes import format_bytes
from kit.memory.workload import Workload
from kit.model.build import open_config
from kit.strategy.launch.launch import LaunchPlan
from kit.strategy.precision import describe_precision
from kit.strategy.processes.launcher import LaunchedRank
from kit.strategy.topology import Topology, gpu_memory
from kit.system.console import silence_libraries
from kit.system.errors import Problems, UserError, counted, first_line, raise_if
from kit.tools.doctor.result import CheckWarning, Report

_NVIDIA = "/proc/driver/nvidia/version"


def check_machine(report: Report, planned: LaunchPlan, launched: LaunchedRank | None) -> None:
    """Make all checks that need no other rank.

    Args:
        launched: this process as a launcher started it; None without one.
    """
    silence_libraries()
    recipe, topology, config = planned.recipe, planned.topology, planned.config
    report.check("launch", lambda: _check_launch(planned, launched))
    report.check("driver", lambda: check_driver(topology))
    report.check("precision", lambda: check_precision(topology, planned.config_file))
    opened: list[Any] = []
    report.check("model", lambda: _check_model(recipe, opened))
    report.check("data", lambda: check_data(recipe.dataset_entries, recipe.eval_dataset_entries))
    workload = None
    if opened:
        workload = planned_workload(resolve_auto(recipe, topology, opened[0])[0], topology, opened[0])
    report.check("GPUs", lambda: check_gpus(topology, workload))
    if workload is None:
        found = "not checked: the plan does not cover this run" if opened else "not checked: there is no model"
        report.add("memory and disk", "warn", found)
        return
    local_world = launched.local_world if launched else -(-topology.num_processes // config.num_machines)
    here = replace(workload, gpus_per_machine=local_world)
    report.check("memory", lambda: check_memory(here, topology))
    report.check("disk", lambda: check_disk(recipe, topology, opened[0]))


def _check_launch(planned: LaunchPlan, launched: LaunchedRank | None) -> str:
    topology, machines = planned.topology, planned.config.num_machines
    found = f"{topology.strategy.title}, {counted(topology.num_processes, 'process')}, config {topology.config_name}"
    problems = [*planned.problems, *planned.batch_problems]
    if launched is None and machines > 1:  # no launcher here, which some of these ask for
        raise_if(problem for problem in problems if problem.where == "main_process_ip")
        found = f"{found}; of {machines} machines only this one is checked"
        raise CheckWarning(found, "docs/multi-node-and-debugging.md says how to start it on all")
    raise_if(problems)
    return found


def check_driver(topology: Topology) -> str:
    """Fail if torch cannot use this machine's NVIDIA GPUs."""
    build = f"torch {torch.__version__}"
    if topology.device_type != "cpu":
        return f"{build} reaches {torch.accelerator.device_count()} GPUs"
    if not os.path.exists(_NVIDIA) or torch.cuda.is_available():
        return f"{build}: runs on the CPU"
    try:
        torch.cuda.init()
        found = "no GPU is visible"
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        found = first_line(error)
    fix = "check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that the driver supports torch's CUDA version"
    raise UserError(build, found, fix=fix)


def check_precision(topology: Topology, config: str | None) -> str:
    """Warn of float32 on a GPU.

    Args:
        config: as the command names it; None without one.
    """
    if lines := describe_precision(topology, config):
        raise CheckWarning("; ".join(lines))
    return f"mixed_precision: {topology.mixed_precision}"


def _check_model(settings: ModelSettings, opened: list[Any]) -> str:
    """Append the model's config to ``opened``, from the hub if it is there."""
    opened.append(open_config(settings))
    return f"{settings.model_name_or_path}: {type(opened[0]).__name__}"


def check_data(train: list[DatasetEntry], evaluation: list[DatasetEntry]) -> str:
    """Fail if a dataset is not found, or the hub refuses it; offline, if it is not in the cache. Reads no row."""
    asked = [*(("dataset", entry) for entry in train), *(("eval_dataset", entry) for entry in evaluation)]
    problems, found = Problems(), {}
    for flag, entry in asked:
        with problems.caught():
            name = hub_id(entry.path, entry.split or "", flag)
            if name is not None and not constants.HF_HUB_OFFLINE:
                ask_hub(name, flag, entry.revision)
            elif name is not None and name not in cached("dataset"):
                raise UserError(not_cached(f"no file or folder {name!r}", name, "dataset", flag))
            found[entry.path if name is None else f"{entry.path} from {constants.ENDPOINT}"] = flag
    problems.raise_if_any()
    return ", ".join(found)


def check_gpus(topology: Topology, workload: Workload | None) -> str:
    """Fail if by the plan the run does not fit a GPU; warn if a config for GPUs has none."""
    if topology.cpu_dry_run:
        raise CheckWarning(f"none: {topology.config_name} runs on the CPU", "train on a machine with GPUs")
    if topology.device_type == "cpu":
        return "none: the run uses the CPU"
    raise_if(memory_problems(workload, topology))
    needed = f"; the plan: {format_bytes(predict(workload).peak)} of each" if workload else ""
    total = gpu_memory(topology)
    size = f" of {format_bytes(total)}" if total else ""
    return f"{torch.accelerator.device_count()}{size}{needed}"


def check_memory(workload: Workload, topology: Topology) -> str:
    """Fail if host memory is too small for loading, training or saving.

    Each rank also needs the memory of this process so far: Python and the libraries. On a CPU also its tensors.
    """
    num_here = min(workload.num_gpus, workload.gpus_per_machine)
    memory = predict(workload)
    parts = {**memory.host, "Python and libraries": num_here * psutil.Process().memory_info().rss}
    if topology.device_type == "cpu":
        parts["tensors"] = num_here * memory.tensors
    free, wanted = host_memory()[1], sum(parts.values())
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    found = f"{format_bytes(free)} free, {format_bytes(wanted)} needed ({shown})"
    if free < wanted:
        fix = "end other programs, use a larger machine or more of them; --async_save false keeps no copy"
        raise UserError("this machine", found, fix=fix)
    return found
