"""Start the run's only ``Accelerator``, and prepare the model and the optimiser with it.

Promises: the run uses the requested strategy, or stops before it loads weights. Without a GPU, the same sharding and
collectives run on the CPU (dry run).
"""

import copy
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.data.feed.data_ranks import Ranks
from kit.model.adapters.adapter import adapters_off
from kit.model.layers.sequence_group import SequenceGroup
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.heads import head_of
from kit.strategy.fsdp import (
    force_fsdp,
    fsdp1_adapter_policy,
    fsdp_plugin,
    is_sharded_layer,
    kept_in_bf16,
    num_replicas,
    replica_groups,
)
from kit.strategy.gradients import take_gradients_as_computed
from kit.strategy.processes.agreement import Fact
from kit.strategy.processes.launcher import cores_of_rank
from kit.strategy.processes.rendezvous import collective_timeout, join_group
from kit.strategy.sending import Sender
from kit.strategy.strategies import SINGLE, Strategy
from kit.strategy.topology import ActualStrategy, ShardedLayers, Topology, gpu_memory, strategy_name
from kit.strategy.weights import InitialWeights
from kit.system.errors import Problem, TrainingError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass
class Prepared:
    """The model and the optimiser, wrapped and sharded, and what else a step or an evaluation needs."""

    accelerator: "Accelerator"
    ranks: Ranks  # the data rank of this process
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer | None"  # None: nothing is trained
    strategy: ActualStrategy
    initial_weights: InitialWeights | None = None  # the reference model; None: the model without its adapters
    has_stepped: bool = False  # in this process

    def keep_initial_weights(self) -> None:
        """Keep a copy of the current weights in host memory: the reference model. Called by all ranks."""
        self.initial_weights = InitialWeights(self.model)

    def reference(self) -> AbstractContextManager[None]:
        """In the ``with`` block, the model is the reference model: the initial policy. Called by all ranks."""
        return self.initial_weights.swapped_in() if self.initial_weights else adapters_off(self.model)

    @property
    def processes(self) -> Ranks:
        """Each process as a rank of its own, without sequence parallelism: for generation and gradients."""
        return data_ranks(self.accelerator)

    @property
    def trained(self) -> "list[torch.nn.Parameter]":
        """The weights that the optimiser trains. To find them in ``model``, the host would visit every module."""
        assert self.optimizer is not None, "a step needs an optimiser"
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def computes_in_float32(self) -> bool:
        """Whether all matmuls are in float32, and none in bf16 or TF32."""
        import torch

        return self.accelerator.mixed_precision == "no" and torch.get_float32_matmul_precision() == "highest"


def start(recipe: Recipe, topology: Topology, facts: Sequence[Fact] = ()) -> "tuple[Accelerator, LoadPlan]":
    """Join the process group, create the ``Accelerator``, and check that it has the strategy of ``topology``.

    Args:
        facts: must be equal on all ranks.

    Returns:
        The accelerator, and how this process must load weights.

    Raises:
        TrainingError: strategy, precision or world size differ from ``topology``, or a rank did not join.
        UserError: ranks differ in ``facts``, or their machines cannot reach each other by name, or the port of the
            rendezvous is in use, or the package of FlashAttention 3 is broken.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        check_cuda_p2p_ib_support,
    )

    on_cpu = topology.device_type == "cpu"
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if recipe.deterministic or on_cpu:
        # On a CPU too, threads sum the gradients of indexed weights (the expert biases of gpt-oss) in any order. An
        # operation without a deterministic kernel is allowed, unless ``deterministic`` was set.
        torch.use_deterministic_algorithms(True, warn_only=not recipe.deterministic)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", not on_cpu)  # noqa: B010 its type is not known
    if not on_cpu:
        # TF32 by default only with bf16: a run in float32 computes in float32.
        tf32 = topology.mixed_precision == "bf16" if recipe.tf32 is None else recipe.tf32
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # For computing on the CPU, all of the run or the optimiser step of offloaded weights: launchers set one thread per
    # rank. The number of threads changes the order of sums, so it is set here and recorded in run.json.
    if on_cpu or topology.strategy.offloads:
        torch.set_num_threads(cores_of_rank())
    if topology.strategy != SINGLE:
        if not on_cpu:
            # Consumer GPUs cannot do this. `accelerate launch` sets these variables, torchrun does not.
            if not check_cuda_p2p_ib_support():
                os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        join_group(topology.backend, recipe.ddp_timeout, facts)
    plugin = fsdp_plugin(topology) if topology.strategy.shards else None
    groups = replica_groups(topology)
    # Unless FSDP reduces gradients after each micro-batch, every rank holds the float32 gradients of the whole model,
    # 4 bytes a parameter, until the last one. DDP holds them anyway, in its buckets, and saves communication.
    sync_each_batch = plugin is not None if recipe.sync_each_batch is None else recipe.sync_each_batch
    if on_cpu:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # FSDP1 takes "cpu" but not "cpu:0"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=topology.mixed_precision,
        fsdp_plugin=None if on_cpu else plugin,
        parallelism_config=None if on_cpu else groups,
        log_with=list(recipe.report_to) or None,
        project_dir=recipe.output_dir,
        # The kit adds up gradients itself (``kit.strategy.gradients.accumulating``).
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_each_batch=sync_each_batch),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # Else autocast keeps its bf16 copies of all float32 weights until the forward pass ends.
            AutocastKwargs(cache_enabled=False),
        ],
    )
    if topology.mixed_precision == "fp16":
        # The step scales the loss (``kit.train.loss_scaling``). On a CPU, Accelerate would not compute in fp16.
        accelerator.scaler, accelerator.native_amp = None, True
    if on_cpu and plugin is not None:
        force_fsdp(accelerator, plugin, groups)
    if accelerator.mixed_precision != topology.mixed_precision:
        raise TrainingError(f"asked for mixed_precision {topology.mixed_precision}, got {accelerator.mixed_precision}")
    actual = strategy_name(accelerator)
    if (actual, accelerator.num_processes) != (topology.strategy.name, topology.num_processes):
        raise TrainingError(
            f"asked for {topology.strategy.title} on {topology.num_processes} processes, "
            f"got {Strategy(actual).title} on {accelerator.num_processes}"
        )
    # FSDP moves weights to the GPU itself. If all ranks quantise, each keeps its 4-bit weights on the GPU on which they
    # are made, since in host memory there would be as many copies as ranks.
    stays_on_cpu = plugin is not None and (recipe.method != "qlora" or topology.load_on_rank0)
    return accelerator, LoadPlan(
        compute_dtype=topology.compute_dtype,
        trained_dtype="bfloat16" if recipe.optim == "adamw_bf16" else "float32",
        device="cpu" if stays_on_cpu else str(accelerator.device),
        quantise_on=str(accelerator.device),
        device_memory=gpu_memory(topology),
        reads_weights=accelerator.is_main_process or not topology.load_on_rank0,
        sequence_group=_sequence_group(topology.sequence_parallel_size, recipe.ddp_timeout),
        is_sharded=topology.strategy.shards,
    )


def check_strategy(topology: Topology, meta_model: "torch.nn.Module") -> list[Problem]:
    """Check that the strategy can shard the model. Needs no weights."""
    problems: list[Problem] = []
    present = {type(module).__name__ for module in meta_model.modules()}
    layers = f"one of {', '.join(sorted(name for name in present if 'Layer' in name or 'Block' in name))}"
    fix = "or leave the line out: the model's own decoder layer is taken"
    for name in topology.layer_classes:
        if name not in present:
            problems.append(Problem("fsdp_transformer_layer_cls_to_wrap", f"no {name} in this model", layers, fix))
    if not topology.strategy.shards:
        return problems
    classes = layer_classes(topology, meta_model)
    if not problems and not classes:
        found = f"{type(meta_model).__name__} does not name the layers to shard"
        problems.append(Problem("fsdp_transformer_layer_cls_to_wrap", found, layers, "name it in the config"))
    if shared := _shared_weight(meta_model, classes):
        found = f"{topology.config_name}: layers of {type(meta_model).__name__} share weights ({shared})"
        problems.append(Problem("config", found, "layers that do not share weights", "--config ddp"))
    return problems


def check_adapter_units(topology: Topology, settings: MethodSettings, meta_model: "torch.nn.Module") -> list[Problem]:
    """Check that FSDP can shard the adapters, and that FSDP1 can train the modules next to adapters or frozen towers.

    Under FSDP1 each trainable module is a unit, which is all-gathered at each call: all ranks must call it equally
    often. A weight that two modules share would be in both units. ``meta_model`` is not changed.
    """
    kind = settings.adapter_type
    if settings.method != "full" and topology.strategy.name == "fsdp1" and kind not in ("lora", "oft"):
        found = f"{kind} under FSDP1, which supports lora and oft only"
        return [Problem("adapter_type", found, fix="--config fsdp")]
    if settings.method != "full" and topology.strategy.name == "fsdp2" and kind == "vera":
        found = f"{kind} under FSDP2: its projections are buffers in float32, which sharding does not cast"
        return [Problem("adapter_type", found, fix="--config ddp")]
    if topology.strategy.name != "fsdp1":
        return []
    from kit.model.adapters.adapter import attach_adapter
    from kit.model.adapters.freeze import trained_encoders
    from kit.model.adapters.reach import freeze_unreached_parts

    adapted: Any = attach_adapter(copy.deepcopy(meta_model), settings)
    found, head = "", adapted.get_output_embeddings()
    if settings.method == "full":
        freeze_unreached_parts(adapted, trained_encoders(adapted, settings))
        if _is_tied(adapted) and head.weight.requires_grad and not all(p.requires_grad for p in adapted.parameters()):
            found = "frozen weights, and a head that is tied to the embedding: one weight cannot be in two FSDP units"
    elif getattr(adapted.peft_config["default"], "target_parameters", None):
        found = "an adapter on experts, whose weights FSDP1 does not all-gather for it"
    elif head_of(meta_model.config) == "lm" and any(p.requires_grad for p in head.parameters()):
        found = (
            "an output head that trains next to adapters: a rank would all-gather it for each chunk of its own targets"
        )
    return [Problem("config", f"fsdp1: {found}", fix="--config fsdp")] if found else []


def _shared_weight(model: "torch.nn.Module", classes: tuple[str, ...]) -> str:
    """The name of a weight that two layers share (Zamba), of which sharding would make two; empty if there is none."""
    owners: dict[int, str] = {}
    for name, layer in model.named_modules():
        if type(layer).__name__ in classes:
            for weight, parameter in layer.named_parameters():
                owner = owners.setdefault(id(parameter), name)
                if not f"{name}.".startswith(f"{owner}."):
                    return f"{name}.{weight}"
    return ""


def layer_classes(topology: Topology, model: "torch.nn.Module") -> tuple[str, ...]:
    """Names of the layer classes to shard: each module of such a class is an FSDP unit."""
    if topology.layer_classes:
        return topology.layer_classes
    present = {type(module).__name__ for module in model.modules()}
    return tuple(sorted(set(getattr(model, "_no_split_modules", None) or ()) & present))


def prepare(
    accelerator: "Accelerator",
    topology: Topology,
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer | None" = None,
) -> Prepared:
    """Move the model and the optimiser to their devices, wrap and shard them. Called by all ranks.

    Args:
        optimizer: None: nothing will be trained.

    Raises:
        TrainingError: a layer that should be sharded is not, the number of replicas is wrong, or tied embeddings are no
            longer tied.
    """
    import torch

    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    classes = layer_classes(topology, accelerator.unwrap_model(model))
    if plugin is not None:
        plugin.transformer_cls_names_to_wrap = list(classes)
        if topology.strategy.name == "fsdp1" and any(not p.requires_grad for p in model.parameters()):
            plugin.auto_wrap_policy = fsdp1_adapter_policy(model, classes)
    tied = _is_tied(model)
    trains = optimizer is not None
    if optimizer is None:
        # Accelerate refuses to prepare a model for FSDP2 without an optimiser. This one is dropped below.
        optimizer = torch.optim.SGD([next(model.parameters())], lr=0.0)
    sender = Sender(model, optimizer) if topology.load_on_rank0 else None
    with kept_in_bf16(model) if topology.strategy.name == "fsdp2" else nullcontext():
        if plugin is None and not any(p.requires_grad for p in model.parameters()):  # DDP would refuse it
            model = accelerator.prepare_model(model, evaluation_mode=True)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
    if sender is not None:
        sender.send(model, optimizer, accelerator.device, topology.strategy.offloads)
    take_gradients_as_computed(model)
    # With FSDP1 the unit is the wrapper around the layer, so `is_sharded_layer` looks at wrappers.
    num_layers = sum(type(module).__name__.removeprefix("FSDP") in classes for module in model.modules())
    num_sharded = sum(is_sharded_layer(module, classes) for module in model.modules())
    if plugin is not None and (num_sharded != num_layers or not num_sharded):
        raise TrainingError(f"{num_sharded} of {num_layers} layers {', '.join(classes)} are sharded")
    if tied and not _is_tied(accelerator.unwrap_model(model)):
        raise TrainingError("input and output embeddings are tied in the model, but no longer after wrapping")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if topology.strategy.name == "fsdp1":  # it shows this rank's shards only; the other strategies show whole tensors
        trainable = int(accelerator.reduce(torch.tensor(trainable, device=accelerator.device)).item())
    if (copies := num_replicas(model)) != topology.num_replicas:
        raise TrainingError(f"asked for {topology.num_replicas} replicas of the model, got {copies}")
    actual = replace(
        planned_strategy(topology, model),
        device=torch.cuda.get_device_name() if topology.device_type == "cuda" else topology.device_type,
        sharded_layers=ShardedLayers(list(classes), num_sharded) if plugin is not None else None,
        num_threads=torch.get_num_threads(),
        trainable_parameters=trainable,
    )
    ranks = data_ranks(accelerator, topology.sequence_parallel_size)
    return Prepared(accelerator, ranks, model, optimizer if trains else None, actual)


def planned_strategy(topology: Topology, model: "torch.nn.Module") -> ActualStrategy:
    """Return the strategy that ``prepare`` would report, from shapes alone: ``model`` may be on meta."""
    classes = layer_classes(topology, model)
    count = sum(type(module).__name__ in classes for module in model.modules())
    return ActualStrategy(
        type=topology.strategy.name,
        config=topology.config_name,
        num_processes=topology.num_processes,
        num_replicas=topology.num_replicas,
        sequence_parallel_size=topology.sequence_parallel_size,
        mixed_precision=topology.mixed_precision,
        device=topology.device_type,
        cpu_dry_run=topology.cpu_dry_run,
        sharded_layers=ShardedLayers(list(classes), count) if topology.strategy.shards else None,
        offload=topology.strategy.offloads,
        num_threads=0,  # only known once the run starts
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def data_ranks(accelerator: "Accelerator", num_parts: int = 1) -> Ranks:
    """Return the data rank of this process, and how to sum tensors over all data ranks.

    Args:
        num_parts: group size of sequence parallelism, of neighbours; each has the same numbers.
    """
    index, part = divmod(accelerator.process_index, num_parts)

    def sum_over_data_ranks(tensor: "torch.Tensor") -> "torch.Tensor":
        return (sum_over_ranks(tensor) / num_parts).to(tensor.dtype)

    own_sum = sum_over_ranks if num_parts == 1 else sum_over_data_ranks
    return Ranks(index, accelerator.num_processes // num_parts, own_sum, part, num_parts)


def _sequence_group(size: int, timeout_seconds: float) -> SequenceGroup | None:
    """The sequence-parallel group of this process; None without sequence parallelism. Called by all ranks."""
    import torch

    if size == 1:
        return None
    # Without it, torch's default time-out would apply.
    group, _ = torch.distributed.new_subgroups(size, timeout=collective_timeout(timeout_seconds))
    return SequenceGroup(group, torch.distributed.get_rank() % size, size)


def sum_over_ranks(tensor: "torch.Tensor") -> "torch.Tensor":
    """Sum a tensor over all processes, on its device. Called by all ranks.

    CPU tensors stay there: the process group has gloo for them, so nothing waits for a device.
    """
    import torch

    if not torch.distributed.is_initialized():
        return tensor
    summed = tensor.clone()
    torch.distributed.all_reduce(summed)
    return summed


def _is_tied(model: "torch.nn.Module") -> bool:
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    return inputs is not None and outputs is not None and inputs.weight is outputs.weight
