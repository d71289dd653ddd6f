"""The machines of a run that the kit starts itself, by the same command on each of them.

Promises: each machine says at once whom it waits for, where and how long; it waits no longer than that. Plain Python.
"""

import socket
import time
from argparse import Namespace
from dataclasses import dataclass

from kit.errors import Problem, TrainingError, UserError
from kit.strategy.network import address_of

DEFAULT_PORT = 29500  # of torchrun and `accelerate launch`
START_ALL = "start the same command on every machine; a firewall must let them reach each other"


@dataclass(frozen=True)
class Machines:
    """The machines of a run, on each of which the user starts the same command."""

    count: int
    address: str  # of the machine that keeps the store by which all meet
    port: int
    is_host: bool  # whether this is that machine
    timeout_seconds: int

    def arguments(self) -> list[str]:
        """Return the arguments of torchrun."""
        conf = {"is_host": int(self.is_host), "join_timeout": self.timeout_seconds, "read_timeout": 60}
        pairs = ",".join(f"{key}={value}" for key, value in conf.items())
        return ["--nnodes", str(self.count), "--rdzv_endpoint", f"{self.address}:{self.port}", "--rdzv_conf", pairs]

    @classmethod
    def from_arguments(cls, arguments: Namespace) -> "Machines | None":
        """Return what ``arguments`` were made from; None for one machine."""
        if not arguments.nnodes.isdecimal():
            return None
        conf = dict(pair.split("=") for pair in arguments.rdzv_conf.split(","))
        address, _, port = arguments.rdzv_endpoint.rpartition(":")
        return cls(int(arguments.nnodes), address, int(port), conf["is_host"] == "1", int(conf["join_timeout"]))

    def waiting_line(self) -> str:
        """Return a line that says whom this machine waits for, where and how long."""
        whom, where = f"for {self.count - 1} more of {self.count} machines", f"{self.address}:{self.port}"
        limit = f"at most {self.timeout_seconds} s (--ddp_timeout)"
        if self.is_host:
            return f"{socket.gethostname()} waits at {where} {whom}, {limit}"
        return f"{socket.gethostname()} waits for {where} (main_process_ip), {limit}"

    def reach_store(self) -> str:
        """Reach the machine that keeps the store.

        Returns:
            The own address in the network of the machines.

        Raises:
            UserError: this is that machine, and its port is taken.
            TrainingError: that machine does not answer in time.
        """
        host, where = socket.gethostname(), f"{self.address}:{self.port}"
        if self.is_host:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
                try:
                    probe.bind(("", self.port))
                except OSError as error:
                    found = f"{self.port} on {host}: {error.strerror}"
                    fix = f"another main_process_port, the same on every machine; `ss -ltnp sport = :{self.port}`"
                    raise UserError(Problem("main_process_port", found, "a free port", fix)) from None
            return address_of(self.address)
        end = time.monotonic() + self.timeout_seconds
        while True:
            try:
                seconds = max(0.1, end - time.monotonic())
                with socket.create_connection((self.address, self.port), seconds) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                if time.monotonic() > end:
                    found = f"{host} did not reach {where} (main_process_ip) within {self.timeout_seconds} s"
                    fix = f"is it the address of one of the machines? {START_ALL}"
                    raise TrainingError(f"{found} (--ddp_timeout): {error.strerror or error}\n    -> {fix}") from None
                time.sleep(0.5)
