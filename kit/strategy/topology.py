"""The strategy of a run: as requested (``Topology``) and as it really runs (``ActualStrategy``).

Plain Python.
"""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from kit.config.settings.method import MethodSettings
from kit.config.settings.optimisation import OptimSettings
from kit.strategy.strategies import Strategy, StrategyName
from kit.system.errors import counted

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.model.load_plan import ComputeDtype

Precision = Literal["no", "bf16", "fp16"]
_DTYPES: "dict[Precision, ComputeDtype]" = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How the run will be distributed. ``kit.strategy.launch.launch`` decides it."""

    strategy: Strategy
    config_name: str  # stem of the Accelerate config file, one that comes with the kit or the user's
    num_processes: int  # world size
    mixed_precision: Precision
    device_type: str  # "cuda", "xpu", "mps" or "cpu"
    cpu_dry_run: bool = False  # a config for GPUs runs on the CPU
    layer_classes: tuple[str, ...] = ()  # classes to shard; empty: the model's own decoder layer
    reshard_after_forward: bool = True
    num_replicas: int = 1  # of the sharded model (HSDP); 1: sharded over all processes
    sequence_parallel_size: int = 1  # group size of sequence parallelism (Ulysses)
    load_on_rank0: bool = False  # only rank 0 reads the weights, and sends the others their shards
    backend: str | None = None  # of torch.distributed; None: torch chooses

    def __post_init__(self) -> None:
        assert self.strategy.replicates == (self.num_replicas > 1)

    @property
    def compute_dtype(self) -> "ComputeDtype":
        """The dtype of matmuls, and of frozen weights."""
        return _DTYPES[self.mixed_precision]

    @property
    def num_data_ranks(self) -> int:
        """The data-parallel size: the number of (groups of) processes with samples of their own."""
        return self.num_processes // self.sequence_parallel_size

    @property
    def num_shards(self) -> int:
        """The number of processes over which weights, gradients and optimiser state are sharded; 1 if they are not."""
        return self.num_processes // self.num_replicas if self.strategy.shards else 1


@dataclass(frozen=True)
class ShardedLayers:
    """The layers that are FSDP units."""

    classes: list[str]  # names of their classes
    count: Count


@dataclass(frozen=True, kw_only=True)
class ActualStrategy:
    """The strategy as it really runs: the entry ``strategy`` of run.json and manifests."""

    type: StrategyName
    config: str  # stem of the Accelerate config file
    num_processes: Positive
    num_replicas: Positive  # of a sharded model; 1: sharded over all processes, or not at all
    sequence_parallel_size: Positive = 1  # group size of sequence parallelism (Ulysses)
    mixed_precision: str
    device: str  # name of the GPU, "mps" or "cpu"
    cpu_dry_run: bool
    sharded_layers: ShardedLayers | None  # None where nothing is sharded
    offload: bool  # CPU offload of weights, gradients and optimiser state
    num_threads: Count  # torch's threads per process; the number affects the order of sums, and so rounding
    trainable_parameters: Count

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> "ActualStrategy":
        """Create it from the values in ``run.json``. Raises ``ValueError``."""
        return TypeAdapter(cls).validate_json(json.dumps(values), strict=True)

    def record(self) -> dict[str, Any]:
        """Return the entry ``strategy`` of run.json and of manifests, in JSON."""
        return asdict(self)

    def describe(self, method: MethodSettings, steps: OptimSettings) -> str:
        """Describe in one line the strategy, gradient checkpointing, the optimiser and the global batch."""
        micro_batch = steps.micro_batch_size
        num_data_ranks = self.num_processes // self.sequence_parallel_size
        accumulation = steps.global_batch_size // (micro_batch * num_data_ranks)
        device = ""
        if self.cpu_dry_run:
            device = " (dry run on CPU)"
        elif self.device in ("cpu", "mps"):
            device = f" on {self.device.upper()}"
        parts = [
            f"{Strategy(self.type).title}{device}",
            counted(self.num_processes, "process"),
            "fp32" if self.mixed_precision == "no" else self.mixed_precision,
        ]
        if self.sequence_parallel_size > 1:
            parts.append(f"sequence parallelism over {self.sequence_parallel_size}")
        if self.sharded_layers:
            replicas = f", {self.num_replicas} replicas" if self.num_replicas > 1 else ""
            parts.append(f"{self.sharded_layers.count} x {'/'.join(self.sharded_layers.classes)} sharded{replicas}")
        parts.append(f"{self.trainable_parameters:,} trainable parameters ({method.method})")
        if method.gradient_checkpointing:
            kind = "selective " if method.gradient_checkpointing == "selective" else ""
            offload = " with activation_offload" if method.activation_offload else ""
            parts.append(f"{kind}gradient checkpointing{offload}")
        if not steps.optim.startswith("adamw_torch"):
            parts.append(steps.optim)
        product = f"{num_data_ranks} (ranks) x {micro_batch} (micro-batch) x {accumulation} (accumulation)"
        parts.append(f"global batch {steps.global_batch_size} = {product}")
        return ", ".join(parts)


def strategy_name(accelerator: "Accelerator") -> StrategyName:
    """Return the name of the strategy that ``accelerator`` really uses."""
    from accelerate.utils import DistributedType

    if accelerator.distributed_type == DistributedType.NO:
        return "single"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "ddp"


def gpu_memory(topology: Topology) -> int | None:
    """Return the bytes of the smallest GPU of this machine; None if the run does not use GPUs."""
    if topology.device_type != "cuda":
        return None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def gpus_of(topology: Topology) -> list[Any]:
    """Return the properties of this machine's NVIDIA GPUs that the run uses; nothing on other devices."""
    import torch

    if topology.device_type != "cuda" or torch.version.hip:
        return []
    # By their properties: asking a GPU itself would take memory of each in every process.
    return [torch.cuda.get_device_properties(i) for i in range(min(topology.num_processes, torch.cuda.device_count()))]
