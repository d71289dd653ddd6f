"""Decide how the run is distributed, and start the processes that it needs.

The topology comes from the Accelerate config (``--config``), else from the environment that the launcher set.

Promises:

- The topology does not depend on how the command was launched.
- If the topology needs several processes and no launcher started them, this process replaces itself by torchrun. With
  a config for several machines, the same command on each of them starts the run. `torchrun`, and `accelerate launch`
  with a config of several processes, set RANK: then the ranks are there already. `accelerate launch` for one process,
  `kit train` and plain `python` do not.
- If the command contradicts the config, the error shows a command that works.
- torch is imported only to count devices.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NoReturn

from kit.config.command_line import Request
from kit.config.conflicts import describe_unused
from kit.config.optimisers import OPTIMISERS
from kit.config.paths import ACCELERATE_CONFIGS
from kit.config.recipe import Recipe
from kit.config.recipe_file import find_file
from kit.config.settings.evaluation import METRIC_PACKAGES
from kit.config.settings.optimisation import FIX_OF_BATCH, OptimSettings
from kit.scoring import own_metric
from kit.strategy.accelerate_config import AccelerateConfig, config_from_environment, read_config
from kit.strategy.compiler import compile_problems
from kit.strategy.launch.launch_problems import launch_problems, started_machines
from kit.strategy.launch.torchrun import DEFAULT_PORT, INHERITED, Machines, torchrun_command
from kit.strategy.precision import check_precision, supported_precision
from kit.strategy.processes.launcher import end_with_launcher, launched_rank
from kit.strategy.processes.network import is_own, warnings_of_address
from kit.strategy.strategies import SINGLE, Strategy
from kit.strategy.topology import Topology
from kit.system import interrupt
from kit.system.console import begin_work, say
from kit.system.errors import Problem, Problems, counted, raise_if
from kit.system.interrupt import OWN_TORCHRUN

_RANK_VARIABLES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()


def resolve(
    request: Request,
    trains: bool = True,
    check: Callable[[Recipe, bool], None] | None = None,
    verb: str = "scoring",
) -> tuple[Recipe, Topology]:
    """Return the final recipe and the topology of this process, and print a summary.

    Does not return if the topology needs several processes and no launcher started them: the process is then replaced
    by torchrun, which starts this command once for each process.

    Args:
        trains: the command trains a model, so it has an ``output_dir``.
        check: called with the recipe, and whether the run needs weights, before torch is imported. Where this command
            starts ranks it is called before that, and not again by each of them.
        verb: what a command does that trains no model, for the summary.

    Raises:
        UserError: with all problems of the recipe, the flags, the config and the launcher; or what ``check`` raises.
    """
    _prepare_process()
    recipe, config, config_name = resolve_config(request)
    was_relaunched = OWN_TORCHRUN in os.environ  # printed and checked before
    if not was_relaunched:  # before the slow imports
        verb = ("checking" if request.launch.dry_run else "fine-tuning") if trains else verb
        count = started_machines()
        machines = f" on {counted(count, 'machine')}" if count else ""
        what = f"{request.recipe_name} ({recipe.method}, {config.strategy.title}{machines})"
        if not trains:
            model = recipe.adapter_name_or_path or recipe.model_name_or_path
            what = f"{model} ({config.strategy.title}{machines})"
        say(f"{verb} {what}" + (f", output_dir {recipe.output_dir}" if trains else ""))
        say(*request.notes, *describe_unused(recipe))
        if check:
            check(recipe, not request.launch.dry_run)
    begin_work("checking model and data")
    planned = _plan(request, recipe, config, config_name, trains)
    recipe, topology = planned.recipe, planned.topology
    say(*([] if was_relaunched else planned.notes))
    raise_if(planned.problems)
    raise_if(planned.batch_problems)
    if request.launch.dry_run:
        return recipe, topology
    if topology.strategy != SINGLE and launched_rank() is None:
        _relaunch(config, topology.num_processes, recipe.ddp_timeout, keep_environment=not request.launch.config)
    if not was_relaunched and (started_machines() or 1) > 1:
        say(*warnings_of_address(os.environ.get("MASTER_ADDR", ""), "MASTER_ADDR"))
    forget_launcher(topology)
    return recipe, topology


def forget_launcher(topology: Topology) -> None:
    """Delete the environment variables by which a launcher would change ``topology``, now that it is decided."""
    for name in [name for name in os.environ if name.startswith(INHERITED)]:
        del os.environ[name]
    if topology.strategy == SINGLE:
        for name in _RANK_VARIABLES:  # a single process needs no process group, not even under torchrun
            os.environ.pop(name, None)


@dataclass(frozen=True)
class LaunchPlan:
    """The result of ``resolve``."""

    recipe: Recipe
    config: AccelerateConfig
    config_file: str | None  # as the command names it; None without --config
    topology: Topology
    problems: list[Problem]  # with how the command was launched, and with the number of processes
    batch_problems: list[Problem]  # with the global batch
    notes: list[str]


def plan_launch(request: Request) -> LaunchPlan:
    """Return the result of ``resolve``, without starting the run.

    Raises:
        UserError: with all problems of the recipe, the flags and the config.
    """
    _prepare_process()
    return _plan(request, *resolve_config(request, checks_batch=False))


def _prepare_process() -> None:
    """Watch the launcher, and set environment variables that libraries read when they are imported."""
    end_with_launcher()
    # OpenMP reads this when torch is imported. Threads that spin while they wait make a busy CPU ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # CUDA's allocator reads this at its first allocation. Batches differ in length, so segments of a fixed size would
    # have gaps into which no later tensor fits.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from kit.system.cache import cache_folder  # imports numpy, which a mistyped flag does not need

    # Of compiled layers. Torch's own choice, in /tmp, is lost at a restart of the machine.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / f"inductor-{os.getuid()}"))


def resolve_config(request: Request, checks_batch: bool = True) -> tuple[Recipe, AccelerateConfig, str]:
    """Return the recipe with its ``output_dir``, the Accelerate config, and its name. Loads no torch.

    Raises:
        UserError: with all problems of the recipe, the flags and the config.
    """
    problems = Problems(request.problems)
    config: AccelerateConfig | None = None
    config_name = None
    with problems.caught():
        if request.launch.config:
            path = find_file(request.launch.config, ACCELERATE_CONFIGS, "config")
            config, config_name = read_config(path), path.stem
        else:
            config = config_from_environment()
    if config and request.launch.sequence_parallel_size:
        config = replace(config, sequence_parallel_size=request.launch.sequence_parallel_size)
    wanted = request.launch.num_processes or (config.num_processes if config else None)
    if request.recipe:
        asked = request.recipe
        problems += _package_problems(asked)
        for name in filter(own_metric.is_own, [*asked.metrics, *asked.rewards]):  # the command named their files
            with problems.caught():
                own_metric.load(name)
    if request.recipe and config:
        problems += _method_problems(asked, config)
        if wanted and checks_batch:
            problems += config.groups.problems(wanted) + _batch_problems(
                request.recipe, wanted, config.sequence_parallel_size
            )
    raise_if(problems)
    assert request.recipe is not None and config is not None
    # A run that a launcher configures has the same output_dir whether it offloads and replicates or not.
    config_name = config_name or Strategy(config.strategy.name).config
    output_dir = os.path.expanduser(request.recipe.output_dir or f"runs/{request.recipe_name}-{config_name}")
    return request.recipe.model_copy(update={"output_dir": output_dir}), config, config_name


def _plan(
    request: Request, recipe: Recipe, config: AccelerateConfig, config_name: str, trains: bool = True
) -> LaunchPlan:
    """Decide the topology, and the values of ``auto`` that follow from it. Counts devices."""
    wanted = request.launch.num_processes or config.num_processes
    num_devices, device_type = (0, "cpu") if config.use_cpu else _devices(config.strategy)
    launched = rank.world if (rank := launched_rank()) else None
    num_processes = wanted or launched or _default_num_processes(config, num_devices)
    problems = launch_problems(request, config, num_processes, launched, num_devices)
    num_replicas = config.groups.num_replicas(num_processes)
    offloads = config.strategy.offloads and num_devices > 0  # without a GPU everything is in CPU memory
    topology = Topology(
        strategy=replace(config.strategy, offloads=offloads, replicates=num_replicas > 1),
        config_name=config_name,
        num_processes=num_processes,
        mixed_precision=config.mixed_precision,
        device_type=device_type,
        cpu_dry_run=not num_devices and not config.use_cpu and config.strategy != SINGLE,
        layer_classes=config.layer_classes,
        reshard_after_forward=config.reshard_after_forward,
        num_replicas=num_replicas,
        sequence_parallel_size=config.sequence_parallel_size,
        load_on_rank0=config.load_on_rank0 and config.strategy.name == "fsdp2",  # FSDP1 cannot start on meta
        backend="cuda:nccl,cpu:gloo" if device_type == "cuda" else None,
    )
    topology, notes = supported_precision(topology)
    if notes:
        problems += check_precision(recipe.optim, topology.strategy, topology.mixed_precision)
    if trains:
        if config.compiles and "torch_compile" not in recipe.model_fields_set:
            recipe = recipe.model_copy(update={"torch_compile": True})
        problems += compile_problems(topology) if recipe.torch_compile is True else []
        if recipe.activation_offload and device_type != "cuda":
            notes.append(f"activation_offload: no effect on {device_type}")
            recipe = recipe.model_copy(update={"activation_offload": False})
    batch_problems = _batch_problems(recipe, num_processes, config.sequence_parallel_size)
    return LaunchPlan(recipe, config, request.launch.config, topology, problems, batch_problems, notes)


def _default_num_processes(config: AccelerateConfig, num_devices: int) -> int:
    """The world size if neither the command nor a launcher gives one."""
    if config.strategy == SINGLE:
        return 1
    if num_devices:
        return num_devices * config.num_machines
    if config.num_machines > 1:
        return config.num_machines
    return math.lcm(config.groups.fewest, config.sequence_parallel_size)  # dry run on CPUs


_NOT_FSDP1 = {
    "freeze": "FSDP1 flattens a layer into one tensor, which cannot be frozen in part",
    "train_only": "FSDP1 flattens a layer into one tensor, which cannot be frozen in part",
    "use_dora": "DoRA reads whole base weights",
    "new_tokens": "FSDP1 cannot train single rows of a module",
    "trainable_tokens": "FSDP1 cannot train single rows of a module",
    "tiled_mlp": "FSDP1 all-gathers adapters for each tile, and ranks have different numbers of tiles",
}


def _method_problems(recipe: Recipe, config: AccelerateConfig) -> Iterator[Problem]:
    """Problems with optimisers and methods that the strategy or its precision does not support."""
    strategy, known = config.strategy, OPTIMISERS[recipe.optim]
    if (known.bitsandbytes and strategy.shards) or (known.not_fsdp1 and strategy.name == "fsdp1"):
        fix = "--optim adamw_torch; or --config ddp: bitsandbytes cannot read sharded parameters"
        if known.not_fsdp1:
            fix = f"--config fsdp: {known.not_fsdp1}"
        yield Problem("optim", f"{recipe.optim} under {strategy.title}", "adamw_torch or adamw_torch_fused", fix)
    yield from check_precision(recipe.optim, strategy, config.mixed_precision)
    if strategy.name == "fsdp1":
        for name, why in _NOT_FSDP1.items():
            if getattr(recipe, name) and (recipe.method != "full" or not name.endswith("_tokens")):
                yield Problem(name, f"under FSDP1 with method {recipe.method}: {why}", fix="--config fsdp")
        if recipe.keeps_initial_weights and recipe.method == "full":
            found = "under FSDP1 with method full: FSDP1 cannot swap in the initial weights (the reference model)"
            yield Problem("beta", found, fix="--config fsdp")


def _package_problems(recipe: Recipe) -> list[Problem]:
    """Problems with optional packages that the settings need and that are not installed."""
    judges = [*recipe.metrics, *recipe.rewards]
    needed = [("metrics or rewards", METRIC_PACKAGES[name], "") for name in judges if name in METRIC_PACKAGES]
    needed += [("report_to", package, "") for package in recipe.report_to]
    if recipe.attn_implementation == "flash_attention_2":
        needed += [("attn_implementation", "flash_attn", "--attn_implementation auto")]
    if recipe.method == "qlora":
        needed += [("method", "bitsandbytes", "--method lora")]
    if OPTIMISERS[recipe.optim].bitsandbytes:
        needed += [("optim", "bitsandbytes", "--optim adamw_torch")]
    return [
        Problem(
            key,
            f"needs {package}, which is not installed",
            fix="; or ".join(filter(None, (f"pip install {package.replace('_', '-')}", instead))),
        )
        for key, package, instead in needed
        if find_spec(package) is None
    ]


def _batch_problems(settings: OptimSettings, num_processes: int, sharing: int = 1) -> list[Problem]:
    """A problem if the global batch cannot be split into whole micro-batches.

    ``sharing``: group size of sequence parallelism.
    """
    batch_size, micro_batch_size = settings.global_batch_size, settings.micro_batch_size
    if num_processes % sharing:
        found = f"{sharing} with {counted(num_processes, 'process')}"
        fix = "--num_processes, a multiple of it; not --config single"
        return [Problem("sequence_parallel_size", found, "a divisor of the world size", fix)]
    unit = num_processes // sharing * micro_batch_size
    if batch_size % unit == 0 or batch_size % micro_batch_size:  # the latter is reported with the recipe
        return []
    groups = counted(num_processes, "process")
    if sharing > 1:
        groups = f"{num_processes // sharing} groups of {sharing} processes"
    found = f"{batch_size} is not divisible by {groups} x per_device_train_batch_size"
    found += f" {micro_batch_size} = {unit}"
    few = "--sequence_parallel_size N, which splits each sample over N processes"
    return [Problem("global_batch_size", found, fix=few if batch_size < num_processes else FIX_OF_BATCH)]


def _devices(strategy: Strategy) -> tuple[int, str]:
    """The number of GPUs of this machine that a run can use, and their device type; 0 and "cpu" without."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return 0, "cpu"
    if accelerator.type == "mps" and strategy != SINGLE:
        say(f"mps is not used: a Mac has one GPU, and {strategy.title} is for several; --config single takes it")
        return 0, "cpu"
    if accelerator.type not in ("cuda", "xpu", "mps"):
        say(f"{accelerator.type} is not used. Training on the CPU")
        return 0, "cpu"
    return torch.accelerator.device_count(), accelerator.type


def _relaunch(config: AccelerateConfig, num_processes: int, timeout_seconds: float, keep_environment: bool) -> NoReturn:
    """Replace this process by torchrun, which starts the same command ``num_processes`` times over all machines."""
    machines = Machines()
    if config.num_machines > 1:
        address = config.main_process_ip
        assert address is not None  # else it was refused
        port = config.main_process_port or DEFAULT_PORT
        machines = Machines(config.num_machines, address, port, is_own(address))
        say(machines.waiting_line(timeout_seconds), *warnings_of_address(address, "main_process_ip"))
    num_local = num_processes // config.num_machines
    interrupt.become(*torchrun_command(sys.argv, num_local, timeout_seconds, keep_environment, machines))
