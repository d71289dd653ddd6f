"""Compare what each rank found on its machine: versions, the kit's source, GPUs, settings of the run, clocks."""

import socket
from typing import Any

import xxhash

from kit.config.recipe import IDENTITY, PACKAGE, REINSTALL, Recipe
from kit.run.facts import code_digest, machine_versions
from kit.tools.doctor.result import Result, ok

# Certificates, caches on a shared disk and logs go wrong before training does.
CLOCK_SECONDS = 5.0


def machine_facts(recipe: Recipe, device: str) -> dict[str, Any]:
    """Return what must be the same on every machine, by its name in messages.

    Args:
        device: the name of this rank's GPU, or ``cpu``.
    """
    settings = {key: getattr(recipe, key) for key in IDENTITY}
    return {
        **machine_versions(),
        "code of kit/": code_digest(PACKAGE),
        "recipe": xxhash.xxh3_64(repr(settings).encode()).hexdigest(),
        "device": device,
    }


def compare_facts(all_facts: list[dict[str, Any]], hosts: list[str]) -> Result:
    """Fail with every fact in which a rank differs from rank 0; a different GPU is only a warning.

    Args:
        all_facts: those of each rank.
        hosts: the machine of each rank.
    """
    differences = []
    for name, value in all_facts[0].items():
        for rank, own in enumerate(all_facts):
            if own[name] != value:
                where = f"rank {rank} ({hosts[rank]})" if len(set(hosts)) > 1 else f"rank {rank}"
                differences.append((name, f"{name} {own[name]} on {where}, {value} on rank 0"))
    num_hosts = len(set(hosts))
    if not differences:
        found = f"{len(hosts)} ranks on {num_hosts} machine{'s' if num_hosts > 1 else ''} have the same"
        return ok("machines", f"{found} versions, code, recipe and device")
    shown = "; ".join(text for _, text in differences[:6])
    more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
    only_device = all(name == "device" for name, _ in differences)
    if only_device:
        return Result("machines", "warn", shown + more, "all ranks wait for the slowest")
    fix = f"the same kit and environment on every machine, and the same command: {REINSTALL}"
    return Result("machines", "fail", shown + more, fix)


def compare_clocks(seconds: list[float], hosts: list[str]) -> Result:
    """Warn if clocks that were read at the same moment differ by more than ``CLOCK_SECONDS``.

    Args:
        seconds: since the epoch, as each rank read them when all had left a barrier.
        hosts: the machine of each rank.
    """
    ranks = range(len(seconds))
    late = max(ranks, key=lambda rank: seconds[rank])
    early = min(ranks, key=lambda rank: seconds[rank])
    skew = seconds[late] - seconds[early]
    if skew <= CLOCK_SECONDS:
        return ok("clocks", f"differ by {skew:.3f} s at most")
    found = f"{hosts[late]} is {skew:.1f} s ahead of {hosts[early]}"
    return Result("clocks", "warn", found, "synchronise the clocks: `timedatectl set-ntp true`, or chrony")


def own_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
