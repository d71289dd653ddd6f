"""The command that starts ranks on this machine by ``torchrun_main``. Plain Python."""

import math
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

# Prefixes of the variables that `accelerate launch` sets; `--config` overrides all of them.
INHERITED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
RENDEZVOUS = "kit"
DEFAULT_PORT = 29500  # of torchrun and `accelerate launch`
START_ALL = "start the same command on every machine; a firewall must let them reach each other"
_FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


@dataclass(frozen=True)
class Machines:
    """The machines of a run. The user starts the same command on each."""

    count: int = 1
    address: str = "127.0.0.1"  # of the master node, which keeps the rendezvous store
    port: int = 0
    is_host: bool = True  # whether this is the master node

    def waiting_line(self, seconds: float) -> str:
        """Return a line: for whom this machine waits, where and how long."""
        where, limit = f"{self.address}:{self.port}", f"at most {seconds:g} s (--ddp_timeout)"
        if self.is_host:
            return (
                f"{socket.gethostname()} waits at {where} for {self.count - 1} more of {self.count} machines, {limit}"
            )
        return f"{socket.gethostname()} waits for {where} (main_process_ip), {limit}"


def torchrun_command(
    script: list[str],
    num_processes: int,
    timeout_seconds: float,
    keep_environment: bool,
    machines: Machines = Machines(),
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ``num_processes`` ranks on this machine, and its environment.

    Args:
        script: the path of a script and its arguments.
        timeout_seconds: how long to wait for other machines, and for ranks to end after a signal.
        keep_environment: whether the ranks take their topology from the variables of `accelerate launch`.
    """
    # Without `--config` the topology comes from the environment, so the new processes need it too.
    env = {key: value for key, value in os.environ.items() if keep_environment or not key.startswith(INHERITED)}
    env = {key: value for key, value in env.items() if not key.startswith("PET_")}  # torchrun takes them for arguments
    # Without this torchrun sets it to 1 and prints a warning. ``accelerator.start`` sets the number of threads.
    env.setdefault("OMP_NUM_THREADS", "1")
    # After forwarding a signal, torchrun kills the ranks after 30 seconds. A step and its save may take longer.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(timeout_seconds)))
    # torchrun forwards the signals that it handles, and dies of the others, such as Slurm's SIGUSR1. It must not handle
    # a signal that `nohup` made this process ignore.
    handled = [name for name in _FORWARDED_SIGNALS if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    options = {
        "nproc_per_node": num_processes,
        "nnodes": machines.count,
        "rdzv_endpoint": f"{machines.address}:{machines.port}",
        "rdzv_conf": f"is_host={int(machines.is_host)},join_timeout={math.ceil(timeout_seconds)}",
        "signals-to-handle": ",".join(handled),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(Path(__file__).with_name("torchrun_main.py")), *words, *script], env
