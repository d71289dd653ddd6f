"""The one ``Accelerator``: the only file that knows what DDP and FSDP need.

Promises: the strategy asked for is the one that runs, or the run stops before loading; a machine without a GPU
rehearses the very same sharding and collectives; nothing outside this file asks which strategy it is.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.config.recipe import LoadPlan, Recipe, Strategy, Topology
from kit.errors import Problem, Problems, TrainingError, UserError, raise_if
from kit.strategy.accelerate_config import TITLES

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

PATIENCE = (
    10  # times ddp_timeout that a collective may take: a slow disk is no hang, and `kit.failures.ranks` finds who hangs
)


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
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=PATIENCE * recipe.ddp_timeout)
        try:
            store = _meet(rank, world, recipe.ddp_timeout)
            torch.distributed.init_process_group(
                topology.backend, store=store, rank=rank, world_size=world, timeout=timeout
            )
        except torch.distributed.DistError as error:
            if "EADDRINUSE" in str(error):
                where, found = "MASTER_PORT", f"{os.environ['MASTER_PORT']} is in use on this machine"
                raise UserError(Problem(where, found, "a free port", "the launcher's --master_port sets it")) from None
            found = f"not all {world} processes came within {recipe.ddp_timeout} s (--ddp_timeout)"
            raise TrainingError(f"{found}: {str(error).splitlines()[0]}") from None
    plugin = _fsdp_plugin(topology) if topology.strategy.startswith("fsdp") else None
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
        _force_fsdp(accelerator, plugin)
    if topology.load_on_rank0:
        # transformers reads these two: ranks other than the first of a machine then keep their weights on meta.
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    actual = _actual_strategy(accelerator)
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


def open_store() -> Any:
    """A connection of its own to the key-value store at which the ranks met; None for a single process."""
    from accelerate.utils import gather_object
    from torch.distributed import PrefixStore, is_initialized

    if not is_initialized():
        return None
    return PrefixStore(gather_object([uuid.uuid4().hex])[0], _connect(3))


def _connect(timeout_seconds: float, is_master: bool = False) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def _meet(rank: int, world: int, timeout_seconds: float) -> Any:
    """A part of the ranks' key-value store in which only the ranks of this start write.

    The store may be the launcher's and outlive ranks that are started anew, which must not find the dead ones'
    addresses; and several launchers count restarts each for itself, so their counts are no name to meet under. Rank 0
    invents one, answers with it to every name that the others invent, and waits until all of them know it.

    Raises:
        torch.distributed.DistError: not all ranks came within ``timeout_seconds``.
    """
    from torch.distributed import DistStoreError, PrefixStore

    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store, mine = _connect(timeout_seconds, is_master), uuid.uuid4().hex
    if rank:
        store.set(f"from/{rank}", mine)
        name = store.get(f"to/{mine}").decode()  # waits
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/all"])
        return PrefixStore(name, store)
    absent, end = set(range(1, world)), time.monotonic() + timeout_seconds
    while absent:
        if time.monotonic() > end:
            raise DistStoreError(f"rank {', '.join(map(str, sorted(absent)))} did not come")
        for other in absent:
            if store.check([f"from/{other}"]):  # of a dead one, maybe; then another will follow
                store.set(f"to/{store.get(f'from/{other}').decode()}", mine)
        absent = {other for other in absent if not store.check([f"{mine}/{other}"])}
        time.sleep(0.01)
    store.set(f"{mine}/all", "here")
    return PrefixStore(mine, store)


def check(topology: Topology, meta_model: "torch.nn.Module") -> list[Problem]:
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


@contextmanager
def together(accelerator: "Accelerator") -> Iterator[None]:
    """What only some ranks can find wrong inside stops all of them, with the same problems."""
    from accelerate.utils import gather_object

    found = Problems()
    with found.caught():
        yield
    raise_if(gather_object(list(found)))


def agree(accelerator: "Accelerator", where: str, value: str) -> None:
    """Stop all ranks, with the same problem about ``where``, unless all of them have the same ``value``."""
    from accelerate.utils import gather_object

    values = gather_object([value])
    others = [str(rank) for rank, other in enumerate(values) if other != values[0]]
    found = f"rank {', '.join(others)} found something else than rank 0"
    raise_if([Problem(where, found, "the same on every machine")] if others else [])


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
) -> "tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]":
    """Place, wrap and shard. Returns model, optimiser, and the strategy as it really is, for ``run.json``.

    Raises:
        TrainingError: the layers that should be sharded are not, or a weight tie was lost.
    """
    import torch

    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    classes = layer_classes(topology, accelerator.unwrap_model(model))
    if plugin is not None:
        plugin.transformer_cls_names_to_wrap = list(classes)
        if topology.strategy == "fsdp1" and any(not p.requires_grad for p in model.parameters()):
            plugin.auto_wrap_policy = _fsdp1_adapter_policy(model, classes)
    tied = _is_tied(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Under FSDP1 a unit hides the module it wraps; the wrapper is what counts.
    num_layers = sum(type(module).__name__.removeprefix("FSDP") in classes for module in model.modules())
    num_sharded = sum(_is_sharded_layer(module, classes) for module in model.modules())
    if plugin is not None and (num_sharded != num_layers or not num_sharded):
        raise TrainingError(f"{num_sharded} of {num_layers} layers {', '.join(classes)} came out sharded")
    if tied and not _is_tied(accelerator.unwrap_model(model)):
        raise TrainingError("input and output embeddings are tied in the model and came out as two")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    actual = {
        "type": _actual_strategy(accelerator),
        "config": topology.config_name,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "device": torch.cuda.get_device_name() if topology.device_type == "cuda" else topology.device_type,
        "rehearsal": topology.rehearsal,
        "sharded_layers": {"classes": list(classes), "count": num_sharded} if plugin is not None else None,
        "offload": topology.offload,
        "num_threads": torch.get_num_threads(),
    }
    if topology.strategy == "fsdp1":  # local pieces of the flat parameters; the others count whole tensors
        trainable = int(accelerator.reduce(torch.tensor(trainable, device=accelerator.device)).item())
    return model, optimizer, {**actual, "trainable_parameters": trainable}


def planned(topology: Topology, meta_model: "torch.nn.Module") -> dict[str, Any]:
    """The same as ``prepare`` reports, foretold from the model's shapes for a dry run."""
    classes = layer_classes(topology, meta_model)
    count = sum(type(module).__name__ in classes for module in meta_model.modules())
    return {
        "type": topology.strategy,
        "config": topology.config_name,
        "num_processes": topology.num_processes,
        "mixed_precision": topology.mixed_precision,
        "device": topology.device_type,
        "rehearsal": topology.rehearsal,
        "sharded_layers": {"classes": list(classes), "count": count} if topology.strategy.startswith("fsdp") else None,
        "trainable_parameters": sum(p.numel() for p in meta_model.parameters() if p.requires_grad),
    }


def describe(actual: dict[str, Any], recipe: Recipe) -> str:
    """One line: what really runs."""
    micro_batch, processes = recipe.per_device_train_batch_size, actual["num_processes"]
    accumulation = recipe.global_batch_size // (micro_batch * processes)
    where = " rehearsed on CPU" if actual["rehearsal"] else " on CPU" if actual["device"] == "cpu" else ""
    parts = [
        f"{TITLES[actual['type']]}{where}",
        f"{processes} process{'es' if processes > 1 else ''}",
        "bf16" if actual["mixed_precision"] == "bf16" else "fp32",
    ]
    if actual["sharded_layers"]:
        parts.append(f"{actual['sharded_layers']['count']} x {'/'.join(actual['sharded_layers']['classes'])} sharded")
    parts.append(f"{actual['trainable_parameters']:,} trainable parameters ({recipe.method})")
    parts.append(f"global batch {recipe.global_batch_size} = {processes} x {micro_batch} x {accumulation}")
    return ", ".join(parts)


def clip_grad_norm(accelerator: "Accelerator", model: "torch.nn.Module", max_norm: float) -> "torch.Tensor":
    """Clip in place to ``max_norm`` (0: measure only). Returns the global norm before clipping, shape []."""
    # FSDP1 recognises its own parameters only when given exactly these.
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    assert norm is not None
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@contextmanager
def generating(accelerator: "Accelerator", model: "torch.nn.Module") -> Iterator[Any]:
    """Yield ``generate`` of the model, usable under every strategy; all ranks must call it equally often."""
    inner = accelerator.unwrap_model(model)
    strategy = _actual_strategy(accelerator)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import register_fsdp_forward_method

        if "generate" not in vars(inner):
            register_fsdp_forward_method(inner, "generate")
        yield partial(inner.generate, synced_gpus=True)
        return
    # `generate` goes past the wrapped forward, and so past its autocast.
    with accelerator.autocast():
        if strategy == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
                yield partial(inner.generate, synced_gpus=True)
        else:
            yield inner.generate


def replicated(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """The parameters of which every process holds a whole copy, by their plain names."""
    from torch.distributed.tensor import DTensor

    if _actual_strategy(accelerator) in ("single", "fsdp1"):  # FSDP1's are pieces that look like tensors
        return {}
    return {plain_name(name): p for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def settle(accelerator: "Accelerator", model: "torch.nn.Module", inputs: "dict[str, Any]") -> None:
    """Bring about now what a strategy would arrange during its first steps. Called by all ranks.

    After its first backward pass DDP sorts the gradients into other buckets. On three and more ranks the order of sums,
    and with it their last bits, follows from the buckets: a resumed run would begin with others than it had.
    """
    if _actual_strategy(accelerator) != "ddp" or accelerator.num_processes < 3:
        return
    for _ in range(2):
        accelerator.backward(model(**inputs).sum() * 0.0)
        model.zero_grad()


def gather_trainable(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Whole trainable tensors by their plain names, in CPU memory of the main process; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # FSDP1 crashes when told to move to CPU memory what is there already.
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    to_cpu = not (on_cpu and _actual_strategy(accelerator) == "fsdp1")
    options = StateDictOptions(full_state_dict=True, cpu_offload=to_cpu, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    return trainable_only(model, state) if accelerator.is_main_process else {}


def trainable_only(model: "torch.nn.Module", state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without what does not train: quantisation tables, and frozen tied weights."""
    trainable = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trainable}


def own_shards(model: "torch.nn.Module") -> "list[torch.nn.Parameter] | None":
    """What this rank keeps of sharded weights, even if a pass ended midway with whole layers gathered.

    None where nothing is sharded. Whole layers of FSDP2 are let go; the model is not to be used afterwards.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(True, recurse=False)  # the root would stay whole until the backward
            unit.reshard()
    if units and not isinstance(units[0], FSDPModule):
        # A unit that is gathered hides its parameters from `parameters()`.
        handles: list[Any] = [handle for unit in units if (handle := getattr(unit, "_handle", None))]
        return [parameter for handle in handles for parameter in handle.flat_param._params]
    return list(model.parameters()) if units else None


def keeps_gradients(model: "torch.nn.Module") -> bool:
    """Whether gradients have their memory from the start, also while ``grad`` is None: in DDP's buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


def takes_optimizer(strategy: Strategy, optim: str) -> bool:
    """Whether the ``optim`` of a recipe works: those of bitsandbytes cannot read sharded parameters."""
    return "8bit" not in optim or not strategy.startswith("fsdp")


def ways_to_share(topology: Topology, recipe: Recipe, on_cpu: bool) -> list[tuple[str, str | int, str]]:
    """How each process would hold less of weights and optimiser: flag, value and cost, the cheapest first.

    ``on_cpu``: of the CPU's memory, which all processes of a machine have together.
    """
    if on_cpu:
        one = ("num_processes", 1, "some speed; the processes of a machine share its memory")
        return [one] if topology.device_type == "cpu" and topology.num_processes > 1 else []
    cost = "more GPUs, to share weights and optimiser"
    offload = ("config", "fsdp_offload", "much speed: CPU memory takes weights and optimiser")
    if not topology.strategy.startswith("fsdp"):
        return [("config", "fsdp", cost), offload] if takes_optimizer("fsdp2", recipe.optim) else []
    num_micro_batches = recipe.global_batch_size // recipe.per_device_train_batch_size
    more = [n for n in range(2 * topology.num_processes, num_micro_batches + 1) if num_micro_batches % n == 0]
    return [*(("num_processes", n, cost) for n in more[:1]), *([] if topology.offload else [offload])]


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front or between."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def _fsdp_plugin(topology: Topology) -> Any:
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    shared: dict[str, Any] = {
        "cpu_offload": topology.offload,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": topology.load_on_rank0,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": False,
    }
    bf16 = topology.mixed_precision == "bf16"
    if topology.strategy == "fsdp2":
        # Gradients are reduced in fp32; outputs keep their type, so that the loss stays fp32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=topology.reshard_after_forward,
            mixed_precision_policy=policy,
            **shared,
        )
    # Buffers stay fp32: rotary frequencies lose long positions in bf16.
    policy1 = (
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        if bf16
        else None
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD" if topology.reshard_after_forward else "SHARD_GRAD_OP",
        use_orig_params=True,
        backward_prefetch="BACKWARD_PRE",
        sync_module_states=topology.load_on_rank0,
        mixed_precision_policy=policy1,
        **shared,
    )


def _force_fsdp(accelerator: "Accelerator", plugin: Any) -> None:
    """Accelerate offers no FSDP on a CPU and would quietly run DDP; torch itself shards there very well."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def _fsdp1_adapter_policy(model: "torch.nn.Module", classes: tuple[str, ...]) -> Any:
    """FSDP1 flattens a unit into one tensor, so trainable leaves need units of their own."""
    from peft.utils.other import fsdp_auto_wrap_policy

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(classes)
    return fsdp_auto_wrap_policy(model)


def _actual_strategy(accelerator: "Accelerator") -> Strategy:
    from accelerate.utils import DistributedType

    if accelerator.distributed_type == DistributedType.NO:
        return "single"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "ddp"


def _is_sharded_layer(module: "torch.nn.Module", classes: tuple[str, ...]) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return type(module.module).__name__ in classes
    return isinstance(module, FSDPModule) and type(module).__name__.removeprefix("FSDP") in classes


def _is_tied(model: "torch.nn.Module") -> bool:
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    return inputs is not None and outputs is not None and inputs.weight is outputs.weight
