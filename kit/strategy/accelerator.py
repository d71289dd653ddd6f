"""The one ``Accelerator``: started, checked, and given the model.

Promises: the strategy asked for is the one that runs, or the run stops before loading; a machine without a GPU
rehearses the very same sharding and collectives.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.data.feed.ranks import Ranks
from kit.errors import Problem, TrainingError
from kit.model.plan import LoadPlan
from kit.strategy.fsdp import force_fsdp, fsdp1_adapter_policy, fsdp_plugin, is_sharded_layer
from kit.strategy.rendezvous import join_group
from kit.strategy.topology import TITLES, ActualStrategy, ShardedLayers, Topology, strategy_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass(frozen=True)
class Prepared:
    """A model on its devices, wrapped and sharded, with its optimiser and what both need to take a step."""

    accelerator: "Accelerator"
    ranks: Ranks
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    strategy: ActualStrategy


def start(recipe: Recipe, topology: Topology) -> "tuple[Accelerator, LoadPlan]":
    """Join the process group, build the one ``Accelerator``, and check that it is what was asked for.

    Returns:
        The accelerator, and how this process must load weights.

    Raises:
        TrainingError: the strategy that really came up is another one.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, check_cuda_p2p_ib_support

    on_cpu = topology.device_type == "cpu"
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # The number of threads changes the order of sums, so it is set here and recorded in run.json.
    if on_cpu:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if topology.strategy != "single":
        if not on_cpu:
            if not check_cuda_p2p_ib_support():  # consumer cards; Accelerate's launcher sets these, torchrun does not
                os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        join_group(topology.backend, recipe.ddp_timeout)
    plugin = fsdp_plugin(topology) if topology.strategy.startswith("fsdp") else None
    if on_cpu:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # FSDP1 takes "cpu" but not "cpu:0"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=topology.mixed_precision,
        fsdp_plugin=None if on_cpu else plugin,
        log_with=list(recipe.report_to) or None,
        project_dir=recipe.output_dir,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if on_cpu and plugin is not None:
        force_fsdp(accelerator, plugin)
    if topology.load_on_rank0:
        # transformers reads these two: ranks other than the first of a machine then keep their weights on meta.
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    actual = strategy_of(accelerator)
    if (actual, accelerator.num_processes) != (topology.strategy, topology.num_processes):
        raise TrainingError(
            f"asked for {TITLES[topology.strategy]} on {topology.num_processes} processes, "
            f"got {TITLES[actual]} on {accelerator.num_processes}"
        )
    # Sharding moves the weights to the device itself, unless they are 4-bit and quantised there.
    stays_on_cpu = plugin is not None and recipe.method != "qlora"
    return accelerator, LoadPlan(
        compute_dtype="bfloat16" if topology.mixed_precision == "bf16" else "float32",
        device="cpu" if stays_on_cpu else str(accelerator.device),
    )


def check_strategy(topology: Topology, meta_model: "torch.nn.Module") -> list[Problem]:
    """What this device, or sharding this model, stands against; told from the model's shapes alone."""
    import torch

    problems = []
    if (
        topology.mixed_precision == "bf16"
        and topology.device_type == "cuda"
        and not torch.cuda.is_bf16_supported(False)
    ):
        found = f"bf16, which {torch.cuda.get_device_name()} does not have"
        problems.append(Problem("mixed_precision", found, "no", "copy the config and set it to no"))
    present = {type(module).__name__ for module in meta_model.modules()}
    layers = f"one of {', '.join(sorted(name for name in present if 'Layer' in name or 'Block' in name))}"
    fix = "or leave the line out: the model's own decoder layer is taken"
    for name in topology.layer_classes:
        if name not in present:
            problems.append(Problem("fsdp_transformer_layer_cls_to_wrap", f"no {name} in this model", layers, fix))
    if topology.strategy.startswith("fsdp") and not problems and not layer_classes(topology, meta_model):
        found = f"{type(meta_model).__name__} does not say which layers to shard"
        problems.append(Problem("fsdp_transformer_layer_cls_to_wrap", found, layers, "name it in the config"))
    return problems


def layer_classes(topology: Topology, model: "torch.nn.Module") -> tuple[str, ...]:
    """Names of the classes of which each module is sharded on its own."""
    if topology.layer_classes:
        return topology.layer_classes
    present = {type(module).__name__ for module in model.modules()}
    return tuple(sorted(set(getattr(model, "_no_split_modules", None) or ()) & present))


def prepare(
    accelerator: "Accelerator",
    topology: Topology,
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
) -> Prepared:
    """Move model and optimiser to their devices, wrap and shard them. Called by all ranks.

    Raises:
        TrainingError: the layers that should be sharded are not, or a weight tie was lost.
    """
    import torch

    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    classes = layer_classes(topology, accelerator.unwrap_model(model))
    if plugin is not None:
        plugin.transformer_cls_names_to_wrap = list(classes)
        if topology.strategy == "fsdp1" and any(not p.requires_grad for p in model.parameters()):
            plugin.auto_wrap_policy = fsdp1_adapter_policy(model, classes)
    tied = _is_tied(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Under FSDP1 a unit hides the module it wraps; the wrapper is what counts.
    num_layers = sum(type(module).__name__.removeprefix("FSDP") in classes for module in model.modules())
    num_sharded = sum(is_sharded_layer(module, classes) for module in model.modules())
    if plugin is not None and (num_sharded != num_layers or not num_sharded):
        raise TrainingError(f"{num_sharded} of {num_layers} layers {', '.join(classes)} came out sharded")
    if tied and not _is_tied(accelerator.unwrap_model(model)):
        raise TrainingError("input and output embeddings are tied in the model and came out as two")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if topology.strategy == "fsdp1":  # local pieces of the flat parameters; the others count whole tensors
        trainable = int(accelerator.reduce(torch.tensor(trainable, device=accelerator.device)).item())
    actual = ActualStrategy(
        type=strategy_of(accelerator),
        config=topology.config_name,
        num_processes=accelerator.num_processes,
        mixed_precision=accelerator.mixed_precision,
        device=torch.cuda.get_device_name() if topology.device_type == "cuda" else topology.device_type,
        rehearsal=topology.rehearsal,
        sharded_layers=ShardedLayers(list(classes), num_sharded) if plugin is not None else None,
        offload=topology.offload,
        num_threads=torch.get_num_threads(),
        trainable_parameters=trainable,
    )
    return Prepared(accelerator, data_ranks(accelerator), model, optimizer, actual)


def planned(topology: Topology, meta_model: "torch.nn.Module") -> ActualStrategy:
    """The strategy that ``prepare`` would report, from the model's shapes alone: for a dry run."""
    classes = layer_classes(topology, meta_model)
    count = sum(type(module).__name__ in classes for module in meta_model.modules())
    return ActualStrategy(
        type=topology.strategy,
        config=topology.config_name,
        num_processes=topology.num_processes,
        mixed_precision=topology.mixed_precision,
        device=topology.device_type,
        rehearsal=topology.rehearsal,
        sharded_layers=ShardedLayers(list(classes), count) if topology.strategy.startswith("fsdp") else None,
        offload=topology.offload,
        num_threads=0,  # set when it starts
        trainable_parameters=sum(p.numel() for p in meta_model.parameters() if p.requires_grad),
    )


def data_ranks(accelerator: "Accelerator") -> Ranks:
    """Which share of each global batch this process computes, and how numbers are summed over all shares.

    Every process has a share of its own here. Where several processes compute one sample together (tensor
    parallelism), they would have the same one.
    """

    def sum_over_ranks(tensor: "torch.Tensor") -> "torch.Tensor":
        return accelerator.reduce(tensor.to(accelerator.device), reduction="sum").to(tensor.device)

    return Ranks(accelerator.process_index, accelerator.num_processes, sum_over_ranks)


def _is_tied(model: "torch.nn.Module") -> bool:
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    return inputs is not None and outputs is not None and inputs.weight is outputs.weight
