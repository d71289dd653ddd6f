"""What the machine gives a run beside its devices: disk, memory, file descriptors, names and ports."""

import errno
import os
import resource
import shutil
import socket
from pathlib import Path

import psutil

from kit.memory.needs import RunNeeds
from kit.memory.sizes import format_bytes
from kit.strategy.machines import DEFAULT_PORT
from kit.strategy.network import check_main_address, check_own_name
from kit.tools.doctor.result import Result, of_problems, ok
from kit.tools.plan.hardware import host_memory

# A rank of recipes/tiny under fsdp has at most 23 files open with 2 ranks, and 27 with 4: gloo takes one for each rank
# and group. The rest is left for data and weights in many files, and for libraries of GPUs.
_OWN_FILES, _FILES_PER_RANK = 128, 3


def check_disk(output_dir: str | None, needs: RunNeeds) -> Result:
    """Fail if the disk of ``output_dir`` has no room for the final model and one checkpoint; warn if not for all."""
    folder = Path(os.path.expanduser(output_dir or ".")).absolute()
    folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Result("disk", "fail", f"{folder} cannot be written to", "choose another --output_dir")
    number = needs.num_checkpoints
    least = needs.final + needs.checkpoint
    wanted = needs.final + needs.checkpoint * (number or 1)
    checkpoints = "1 checkpoint" if number == 1 else f"{number or 'all'} checkpoints"
    plan = f"{checkpoints} of {format_bytes(needs.checkpoint)} and final/ of {format_bytes(needs.final)}"
    found = f"{format_bytes(free)} free in {folder}, needed for {plan}: {format_bytes(wanted)}"
    if number is None:
        found += " for one"
    fix = "make room, choose another --output_dir, or keep fewer: --save_total_limit 1, --save_only_model"
    if free < least:
        return Result("disk", "fail", found, fix)
    return Result("disk", "warn", found, fix) if free < wanted else ok("disk", found)


def check_memory(needs: RunNeeds, local_world: int) -> Result:
    """Fail if host memory is too small for loading, or for what training and saving keep there.

    Each rank also needs what this process holds by now: Python and the libraries.
    """
    _, free = host_memory()
    libraries = local_world * psutil.Process().memory_info().rss
    wanted = libraries + max(needs.loading, needs.host)
    parts = (
        f"libraries {format_bytes(libraries)}, loading {format_bytes(needs.loading)}, "
        f"then training and saving {format_bytes(needs.host)}"
    )
    found = f"{format_bytes(free)} free, {format_bytes(wanted)} needed ({parts})"
    if free < wanted:
        fix = "end other programs, take a larger machine or more of them; --async_save false keeps no copy"
        return Result("memory", "fail", found, fix)
    return ok("memory", found)


def check_file_descriptors(num_processes: int) -> Result:
    """Fail if a rank may not open the connections to all others."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OWN_FILES + _FILES_PER_RANK * num_processes
    found = f"{allowed} allowed, {wanted} needed by a rank of {num_processes}"
    if resource.RLIM_INFINITY != allowed < wanted:
        more = "" if most == resource.RLIM_INFINITY or most >= wanted else ", which root must allow (limits.conf)"
        return Result("file descriptors", "fail", found, f"ulimit -n {max(4096, wanted)}{more}")
    return ok("file descriptors", found)


def check_names(several_machines: bool, main_address: str | None = None) -> Result:
    """Fail if a name by which other machines shall reach this one, or the main one, means loopback."""
    host = socket.gethostname()
    if not several_machines:
        return ok("host name", f"{host}; one machine only, so nobody has to reach it")
    problems = check_main_address(main_address, "main_process_ip") if main_address else []
    return of_problems("host name", [*problems, *check_own_name()], f"{host} can be reached")


def check_port(port: int | None, is_needed: bool) -> Result:
    """Fail if the port of the rendezvous is taken; warn if this run does not need it.

    Args:
        port: of the config; None: the default of the launchers.
        is_needed: whether the launcher of this run takes this port. The kit's own takes any free one.
    """
    number = port or DEFAULT_PORT
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        try:
            probe.bind(("", number))
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            fix = f"`ss -ltnp sport = :{number}` says by whom; or give another one: --main_process_port, --master_port"
            if is_needed:
                return Result("port", "fail", f"{number} {reason}", fix)
            found = f"{number} {reason}; the kit's own launcher takes a free one, torchrun and accelerate do not"
            return Result("port", "warn", found, fix)
    return ok("port", f"{number} is free")
