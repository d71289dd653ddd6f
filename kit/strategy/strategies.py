"""The strategies of distributed training: single, DDP, FSDP2, FSDP1, HSDP, CPU offload. Plain Python."""

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["single", "ddp", "fsdp2", "fsdp1"]
_TITLES: dict[StrategyName, str] = {"single": "Single", "ddp": "DDP", "fsdp2": "FSDP2", "fsdp1": "FSDP1"}


@dataclass(frozen=True)
class Strategy:
    """How the processes of a run share the model."""

    name: StrategyName  # ``type`` of ``strategy`` in run.json
    offloads: bool = False  # CPU offload of weights, gradients and optimiser state
    replicates: bool = False  # HSDP: several groups of processes shard a replica of the model each

    @property
    def title(self) -> str:
        """The name in messages."""
        return _TITLES[self.name]

    @property
    def shards(self) -> bool:
        """Whether each process holds only a part of weights, gradients and optimiser state."""
        return self.name in ("fsdp2", "fsdp1")

    @property
    def config(self) -> str:
        """The name of the shipped Accelerate config, as ``--config`` takes it."""
        if self.name != "fsdp2":
            return self.name
        if self.offloads:
            return "fsdp_offload"
        return "fsdp_hybrid" if self.replicates else "fsdp"


SINGLE = Strategy("single")
DDP = Strategy("ddp")
FSDP2 = Strategy("fsdp2")
FSDP1 = Strategy("fsdp1")
HYBRID = Strategy("fsdp2", replicates=True)
OFFLOAD = Strategy("fsdp2", offloads=True)
