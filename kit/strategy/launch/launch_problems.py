"""Problems with how a command was launched, each with a command that works. Plain Python."""

import os
import re
import shlex
import sys

from kit.config.command_line import Request
from kit.strategy.accelerate_config import AccelerateConfig
from kit.strategy.processes.launcher import num_processes_of_accelerate, started_again
from kit.strategy.processes.network import check_main_address
from kit.strategy.strategies import SINGLE
from kit.system.errors import Problem


def launch_problems(
    request: Request, config: AccelerateConfig, num_processes: int, launched: int | None, num_devices: int
) -> list[Problem]:
    """Problems with how the command was launched, each with a command that works.

    Args:
        num_processes: the world size that the run needs.
        launched: the number that a launcher started; None without a launcher.
        num_devices: GPUs of this machine.
    """
    flags = re.sub(r"--num[-_]processes[= ]\S+ ?", "", shlex.join(sys.argv[1:]))
    script = f"{_script()} {flags}".strip()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return [started_again()]
    started = started_machines()
    if started is not None and started < config.num_machines:
        found = f"{config.num_machines} in the config, the launcher started {started}"
        return [Problem("num_machines", found, fix="correct it, or let the launcher start as many (--nnodes)")]
    asked = num_processes_of_accelerate() if launched is None else None
    if asked and asked > 1 and asked != num_processes:
        found = f"accelerate launch got {asked}, and started one process"
        config_flag = "" if request.launch.config else " --config ddp"
        command = f"accelerate launch {script}{config_flag} --num_processes {asked}"
        return [Problem("--num_processes", found, fix=f"give it to the script: `{command}`")]
    if config.strategy == SINGLE and num_processes > 1:
        found = f"{launched or num_processes} with a single-process config"
        fix = f"`accelerate launch --num_processes 1 {script}`" if launched else "--config ddp; or --config fsdp"
        return [Problem("--num_processes", found, "1", fix)]
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
    """Return on how many machines torchrun or `accelerate launch` started ranks; None without them."""
    started = os.environ.get("GROUP_WORLD_SIZE")
    return int(started) if started else None


def _machine_problems(config: AccelerateConfig, num_processes: int, num_devices: int) -> list[Problem]:
    """Problems with a config for several machines, each of which starts its ranks itself."""
    count, problems = config.num_machines, []
    if config.strategy == SINGLE:
        found = f"{count} machines with a single-process config"
        return [Problem("num_machines", found, "1", "--config ddp or fsdp, or a copy of one of them with these lines")]
    if num_processes % count:
        expected = "the same number on each machine: it counts those of all machines"
        problems.append(Problem("num_processes", f"{num_processes} over {count} machines", expected))
    elif num_devices and num_processes // count > num_devices:
        found = f"{num_processes // count} on a machine with {num_devices} GPUs"
        problems.append(Problem("num_processes", found, f"at most {num_devices * count} over {count} machines"))
    if config.main_process_ip is None:
        fix = "add it to the config, the same on every machine; then type the same command on each"
        return [*problems, Problem("main_process_ip", "missing", "the address of one of the machines", fix)]
    return problems + check_main_address(config.main_process_ip, "main_process_ip")


def _script() -> str:
    """The script of this command, for a launcher; or the module, if its folder must not be on the path."""
    path = os.path.relpath(sys.argv[0])
    return "-m kit.cli.main" if os.path.basename(path) in ("kit", "main.py") else shlex.quote(path)
