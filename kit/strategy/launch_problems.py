"""Problems with how a command was launched, each with a command that works. Plain Python."""

import math
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from kit.config.command_line import Request
from kit.errors import Problem, UserError
from kit.strategy.accelerate_config import AccelerateConfig, read_config
from kit.strategy.launcher import launched_rank, num_processes_of_accelerate
from kit.strategy.machines import START_ALL
from kit.strategy.network import check_main_address
from kit.strategy.strategies import SINGLE


def launch_problems(
    request: Request, config: AccelerateConfig, num_processes: int, launched: int | None, num_devices: int
) -> list[Problem]:
    """Problems with how the command was launched, each with a command that works.

    Args:
        num_processes: the number of processes that the run needs, over all machines.
        launched: the number that a launcher started; None without a launcher.
        num_devices: GPUs of this machine.
    """
    strategy = config.strategy
    arguments = shlex.join(_without(sys.argv[1:], "--num_processes"))
    script = f"{_script()} {arguments}".strip()
    if launched is not None and (problems := _absent_machines(config)):
        return problems
    asked = num_processes_of_accelerate() if launched is None else None
    if asked and asked > 1 and asked != num_processes:
        config_name = "ddp" if strategy == SINGLE else shlex.quote(str(request.launch.config))
        wish = f"--config {config_name} --num_processes {asked}"
        found = f"accelerate launch was given {asked}, and started one process"
        flags = shlex.join(_without(_without(sys.argv[1:], "--num_processes"), "--config"))
        command = f"accelerate launch {_script()} {wish} {flags}".rstrip()
        return [Problem("--num_processes", found, fix=f"give it to the script: `{command}`")]
    if strategy == SINGLE and num_processes > 1:
        if launched and launched > 1:
            fix = f"`accelerate launch --num_processes 1 {script}`"
            return [Problem("--config", f"a single-process config under a launcher that started {launched}", fix=fix)]
        return [
            Problem(
                "--num_processes",
                f"{num_processes} with a single-process config",
                "1",
                "--config ddp; or --config fsdp",
            )
        ]
    if problems := config.groups.problems(num_processes):
        return problems
    if launched and launched != num_processes:
        fix = f"`torchrun --nproc_per_node {num_processes} {script}`"
        return [Problem("--num_processes", f"{num_processes} wanted, the launcher started {launched}", fix=fix)]
    if launched is None and config.num_machines > 1:
        return _machine_problems(config, num_processes, num_devices)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) if launched else num_processes
    if num_devices and local > num_devices:
        return [Problem("--num_processes", f"{local} on a machine with {num_devices} GPUs", f"at most {num_devices}")]
    return []


def started_machines() -> int | None:
    """Return on how many machines the launcher started ranks; None where it does not say, or without a launcher."""
    started = os.environ.get("GROUP_WORLD_SIZE")  # of torchrun and `accelerate launch`
    rank = launched_rank()
    if started is None and rank and "LOCAL_WORLD_SIZE" in os.environ:
        return math.ceil(rank.world / rank.local_world)
    return int(started) if started else None


def _absent_machines(config: AccelerateConfig) -> list[Problem]:
    """A problem if the launcher started ranks on fewer machines than the config names, or than it was asked for."""
    started, asked = started_machines(), _asked_machines()
    wanted = max(asked, config.num_machines)
    if started is None or started >= wanted:
        return []
    if asked == wanted:
        found, fix = f"{wanted} asked of the launcher, which started {started}", START_ALL
    else:
        found = f"{wanted} in the config, the launcher started {started}"
        fix = f"correct it, or let the launcher start {wanted}: torchrun --nnodes {wanted} on each machine"
    return [Problem("num_machines", found, fix=fix)]


def _asked_machines() -> int:
    """How many machines the launcher, the parent of this process, was given at least; 1 where that is not known."""
    asked = os.environ.get("PET_NNODES", "1")  # torchrun's variable for --nnodes
    with suppress(psutil.Error):
        words = psutil.Process(os.getppid()).cmdline()
        if not any("torch" in word or "accelerate" in word for word in words[:3]):
            return 1
        own = " ".join(words[: words.index(sys.argv[0])] if sys.argv[0] in words else words)
        if found := re.search(r"--(?:nnodes|num[-_]machines)[ =](\S+)", own):
            asked = found[1]
        elif found := re.search(r"--config[-_]file[ =](\S+)", own):
            with suppress(UserError):
                asked = str(read_config(Path(found[1])).num_machines)
    fewest = asked.partition(":")[0]  # of a range: torchrun may start with so many
    return int(fewest) if fewest.isdecimal() else 1


def _machine_problems(config: AccelerateConfig, num_processes: int, num_devices: int) -> list[Problem]:
    """Problems with a config for several machines, each of which starts its ranks itself."""
    count, problems = config.num_machines, []
    if config.strategy == SINGLE:
        found = f"{count} machines with a single-process config"
        return [Problem("num_machines", found, "1", "--config ddp or fsdp, or a copy of one of them with these lines")]
    if num_processes % count:
        found = f"{num_processes} over {count} machines"
        problems.append(
            Problem("num_processes", found, "the same number on each machine: it counts those of all machines")
        )
    elif num_devices and num_processes // count > num_devices:
        found = f"{num_processes // count} on a machine with {num_devices} GPUs"
        problems.append(Problem("num_processes", found, f"at most {num_devices * count} over {count} machines"))
    if config.main_process_ip is None:
        fix = "add it to the config, the same on every machine; then type the same command on each"
        problems.append(Problem("main_process_ip", "missing", "the address of one of the machines", fix))
        return problems
    return problems + check_main_address(config.main_process_ip, "main_process_ip")


def _script() -> str:
    """What a launcher takes to start this command: a script, or a module, whose folder it must not put on the path."""
    path = os.path.relpath(sys.argv[0])
    return "-m kit.cli.main" if os.path.basename(path) in ("kit", "main.py") else shlex.quote(path)


def _without(words: list[str], flag: str) -> list[str]:
    kept = []
    skip = False
    for word in words:
        name = word.replace("-", "_").replace("__", "--", 1)
        if not skip and name != flag and not name.startswith(f"{flag}="):
            kept.append(word)
        skip = name == flag
    return kept
