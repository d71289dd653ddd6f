"""The key ``parallelism_config`` of an Accelerate config: how the processes are divided into groups.

Promises: hybrid sharding (``dp_replicate_size`` and ``dp_shard_size``) is taken as written. A size of any other
dimension is refused with the reason, and none is ignored. Plain Python.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kit.errors import Problem, did_you_mean
from kit.strategy.strategies import StrategyName

PREFIX = "parallelism_config_"
_PAGE = "docs/parallelism.md says more"
# What is not offered: the size that asks for it, the reason, and what to use instead.
_REFUSED = {
    "tp_size": "tensor parallelism works neither with adapters nor, in Accelerate, with FSDP2; "
    f"remove it: FSDP2 alone divides the same weights. {_PAGE}",
    "cp_size": "context parallelism drops the masks that keep packed samples apart; "
    f"remove it: --gradient_checkpointing true makes room for long rows. {_PAGE}",
    "sp_size": "Accelerate's sequence parallelism is DeepSpeed's; "
    f"remove it: --gradient_checkpointing true makes room for long rows. {_PAGE}",
}
# How a refused dimension would work. `accelerate config` writes some of them beside a size of 1.
_WITHOUT_EFFECT = """
cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation
""".split()
_KEYS = [PREFIX + key for key in ("dp_replicate_size", "dp_shard_size", *_REFUSED, *_WITHOUT_EFFECT)]

# Appends a problem: (key, found, expected, fix).
Refuse = Callable[[str, Any, str, str], None]


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """The sizes of hybrid sharding. One that is None follows from the number of processes; both: no hybrid sharding."""

    replicas: int | None = None  # dp_replicate_size: copies of the sharded model
    shards: int | None = None  # dp_shard_size: processes that share one copy

    @property
    def fewest(self) -> int:
        """The fewest processes that have these groups; 2 without hybrid sharding."""
        if self == GroupSizes():
            return 2
        return (self.replicas or 2) * (self.shards or 2)

    def num_replicas(self, num_processes: int) -> int:
        """Return the number of copies on ``num_processes``; 1 if they cannot be divided into these groups."""
        if self.problems(num_processes):
            return 1
        return self.replicas or num_processes // (self.shards or num_processes)

    def problems(self, num_processes: int) -> list[Problem]:
        """Return a problem if ``num_processes`` cannot be divided into these groups."""
        replicas, shards = self.replicas, self.shards
        if replicas and shards:
            if replicas * shards == num_processes:
                return []
            found = f"{replicas} x {shards} = {replicas * shards} (dp_replicate_size x dp_shard_size)"
            fix = f"--num_processes {replicas * shards}; or leave out one of both keys: it follows from the other"
            return [Problem("parallelism_config", found, f"{num_processes}, the number of processes", fix)]
        name, size = "dp_shard_size", shards
        if replicas:
            name, size = "dp_replicate_size", replicas
        if size is None or (num_processes % size == 0 and num_processes != replicas):
            return []
        least = 2 * size if replicas else size
        more = max(least, round(num_processes / size) * size)
        found, expected = f"{name} {size} on {num_processes} processes", f"a multiple of {size}, from {least} on"
        fix = f"--num_processes {more}" + ("; or --config fsdp" if num_processes < more else "")
        return [Problem("parallelism_config", found, expected, fix)]


def hint_for_key(key: str) -> str:
    """Return what to do about a key of ``parallelism_config`` that stands elsewhere, or lacks the prefix.

    Returns:
        Why its dimension is not offered, or where the key belongs; empty for a key of anything else.
    """
    name = key.removeprefix(PREFIX)
    is_known = PREFIX + name in _KEYS
    return _REFUSED.get(name) or (f"write {PREFIX}{name}, under parallelism_config" if is_known else "")


def group_sizes(config: Any, strategy: StrategyName, refuse: Refuse) -> GroupSizes:
    """Return the sizes that the value of ``parallelism_config`` asks for, and refuse what is not offered.

    Args:
        refuse: called with each fault: key, what was found, what was expected, what to do.
    """
    if not isinstance(config, dict):
        refuse("parallelism_config", config, f"a mapping of {PREFIX} keys", "")
        return GroupSizes()
    sizes = {}
    for key, value in config.items():
        name = str(key).removeprefix(PREFIX)
        if key not in _KEYS:
            hint = hint_for_key(str(key)) or did_you_mean(str(key), _KEYS) or "remove it"
            refuse(str(key), key, "a key of Accelerate", hint)
        elif name in _WITHOUT_EFFECT:
            continue
        elif not (str(value).isdecimal() and int(value)):
            refuse(key, value, "a whole number from 1", "")
        elif name in _REFUSED:
            if int(value) != 1:
                refuse(key, value, "1", _REFUSED[name])
        else:
            sizes[name] = int(value)
    replicas, shards = sizes.get("dp_replicate_size"), sizes.get("dp_shard_size")
    if strategy != "fsdp2":
        for key, size in sizes.items():
            if size > 1:
                fix = "set distributed_type: FSDP and fsdp_version: 2, as accelerate_configs/fsdp_hybrid.yaml does"
                refuse(f"{PREFIX}{key}", size, "1 without FSDP2", fix)
        return GroupSizes()
    if shards == 1:
        if (replicas or 1) > 1:
            refuse(f"{PREFIX}dp_shard_size", 1, "2 or more", "whole copies are --config ddp")
        return GroupSizes()  # as `accelerate config` writes it where nothing was chosen
    if replicas == 1 and not shards:
        return GroupSizes()
    return GroupSizes(replicas=replicas, shards=shards)
