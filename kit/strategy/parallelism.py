"""Process groups of HSDP (hybrid sharding), and why other kinds of parallelism are not offered. Plain Python."""

from dataclasses import dataclass

from kit.strategy.strategies import StrategyName
from kit.system.errors import Problem

PREFIX = "parallelism_config_"
_PAGE = "docs/distributed.md says more"
# Sizes in an Accelerate config that are not supported: the reason, and what to use instead.
NOT_OFFERED = {
    "tp_size": "tensor parallelism is wrong with LoRA, and gradients cannot be clipped; "
    f"remove it: FSDP2 alone shards the same weights. {_PAGE}",
    "cp_size": "context parallelism drops the attention mask, so packed samples would attend to each other; "
    f"use sp_size (sequence parallelism). {_PAGE}",
}


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """Group sizes of HSDP. A size that is None follows from the world size; both None: no HSDP."""

    replicas: int | None = None  # dp_replicate_size: replicas of the sharded model
    shards: int | None = None  # dp_shard_size: processes that share a replica

    @property
    def fewest(self) -> int:
        """The smallest world size with these groups; 2 without HSDP."""
        return 2 if self == GroupSizes() else (self.replicas or 2) * (self.shards or 2)

    def num_replicas(self, num_processes: int) -> int:
        """Return the number of replicas on ``num_processes``, also if they cannot be divided into these groups."""
        return min(self.replicas or max(1, num_processes // (self.shards or num_processes)), num_processes)

    def problems(self, num_processes: int) -> list[Problem]:
        """Return a problem if ``num_processes`` cannot be divided into these groups."""
        replicas = self.num_replicas(num_processes)
        shards = self.shards or num_processes // replicas
        if replicas * shards == num_processes and (shards > 1 or not self.replicas):
            return []
        given = {"dp_replicate_size": self.replicas, "dp_shard_size": self.shards}
        sizes = {name: size for name, size in given.items() if size}
        found = f"{num_processes} with {' and '.join(f'{name} {size}' for name, size in sizes.items())}"
        expected = f"a multiple of {next(iter(sizes.values()))}, from {self.fewest} on"
        fix = "another number of processes; or --config fsdp"
        return [Problem("num_processes", found, "their product" if len(sizes) == 2 else expected, fix)]


def group_sizes(
    replicas: int | None, shards: int | None, strategy: StrategyName
) -> tuple[GroupSizes, tuple[str, str, str] | None]:
    """Return the groups of an Accelerate config, and the problem with them: found, expected, fix."""
    if strategy != "fsdp2":
        if max(replicas or 1, shards or 1) > 1:
            fix = "distributed_type: FSDP and fsdp_version: 2, as accelerate_configs/fsdp_hybrid.yaml has"
            return GroupSizes(), ("dp sizes above 1", "1 without FSDP2", fix)
        return GroupSizes(), None
    if shards == 1 and (replicas or 1) > 1:
        return GroupSizes(), ("dp_shard_size 1", "2 or more", "--config ddp replicates the whole model")
    if shards == 1 or (replicas == 1 and not shards):  # as `accelerate config` writes it where nothing was chosen
        return GroupSizes(), None
    return GroupSizes(replicas=replicas, shards=shards), None
