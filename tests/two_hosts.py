"""Hosts on one machine: network namespaces with cables to a switch, and host names of their own.

Needs root, `ip` and `unshare`. The processes of a host are those in its network namespace, whoever their parent is, so
all of them can be found, and killed.
"""

import os
import shutil
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

NAMES = ("alpha", "beta")


def why_not() -> str:
    """Why this machine cannot have several hosts; empty if it can."""
    if os.geteuid():
        return "two hosts need root, for network namespaces"
    for tool in ("ip", "unshare", "mount", "hostname"):
        if not shutil.which(tool):
            return f"two hosts need `{tool}`"
    name = f"kit-{os.getpid()}"
    tried = ["unshare -m -u true", f"ip netns add {name}", f"ip -n {name} link add switch type bridge"]
    done = [subprocess.run(words.split(), capture_output=True, text=True) for words in tried]
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    said = "".join(each.stderr for each in done)
    return f"two hosts need network namespaces: {said}" if any(each.returncode for each in done) else ""


class Started:
    """A command on a host."""

    def __init__(self, host: "Host", process: Any, log: Path) -> None:
        self.host, self.process, self.log, self.began = host, process, log, time.monotonic()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Exit status, once the command and every process of its host are gone."""
        began = time.monotonic()
        status = self.process.wait(seconds)
        while left := self.host.processes():
            assert time.monotonic() < began + seconds, f"{left} linger on {self.host.name}:\n{self.text}"
            time.sleep(0.1)
        return int(status)


class Host:
    """A host with an address, a name and an ``/etc/hosts`` of its own."""

    def __init__(self, name: str, address: str, namespace: str, folder: Path) -> None:
        self.name, self.address, self.namespace, self.folder = name, address, namespace, folder
        self.started: list[Started] = []
        self.names = folder / f"{name}-etc-hosts"

    def start(self, command: list[str], **env: str) -> Started:
        """Start ``command``."""
        log = self.folder / f"{self.name}-{len(self.started)}.log"
        script = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        outer = ["ip", "netns", "exec", self.namespace, "unshare", "-m", "-u", "--propagation", "private"]
        words = [*outer, "sh", "-ec", script, "sh", self.name, str(self.names), *command]
        kept = {key: value for key, value in os.environ.items() if "PROXY" not in key.upper()}
        with log.open("w") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=kept | {"TMPDIR": "/tmp"} | env)
        self.started.append(Started(self, process, log))
        return self.started[-1]

    def processes(self) -> list[psutil.Process]:
        """All processes of this host, without those that are dead and not yet waited for."""
        own = os.stat(f"/run/netns/{self.namespace}").st_ino
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_here = os.stat(f"/proc/{process.pid}/ns/net").st_ino == own
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for one in self.started:
            one.process.kill()
            one.process.wait()


class TwoHosts:
    """Hosts ``alpha`` (10.77.0.1) and ``beta`` (10.77.0.2), each with a cable to one switch."""

    def __init__(self, folder: Path) -> None:
        mark = uuid.uuid4().hex[:6]
        self._switch = f"kit-{mark}-switch"
        _run("netns", "add", self._switch)
        _run("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("-n", self._switch, "link", "set", "switch", "up")
        self.alpha, self.beta = self.both = [
            Host(name, f"10.77.0.{number}", f"kit-{mark}-{name}", folder) for number, name in enumerate(NAMES, start=1)
        ]
        names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.both)
        for host in self.both:
            host.names.write_text(names)
            inside = ("-n", host.namespace)
            _run("netns", "add", host.namespace)
            # One end of the cable has the host's name, and is in the switch.
            cable = ["type", "veth", "peer", "name", "eth7", "netns", host.namespace]
            _run("-n", self._switch, "link", "add", host.name, *cable)
            _run("-n", self._switch, "link", "set", host.name, "master", "switch", "up")
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth7")
            _run(*inside, "link", "set", "eth7", "up")
            _run(*inside, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable of alpha."""
        _run("-n", self._switch, "link", "set", self.alpha.name, "down")

    def close(self) -> None:
        """End all processes of the hosts, and the hosts."""
        for host in self.both:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)  # and the cable with it
        subprocess.run(["ip", "netns", "del", self._switch], check=False)


def _run(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
