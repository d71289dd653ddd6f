"""Two hosts on one machine: network namespaces with a cable between them, host names, and disks of their own.

Needs root, `ip` and `unshare`. All processes that a host starts carry its name in their environment, so that they can
be found, and killed, whoever their parent is.
"""

import os
import shutil
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

_MARK = "KIT_TEST_HOST"


def why_not() -> str:
    """Why this machine cannot have two hosts; empty if it can."""
    if os.geteuid():
        return "two hosts need root, for network namespaces"
    for tool in ("ip", "unshare", "mount", "hostname"):
        if not shutil.which(tool):
            return f"two hosts need `{tool}`"
    name = f"kit-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    tried = subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, text=True)
    return (
        f"two hosts need network namespaces: {done.stderr}{tried.stderr}" if done.returncode + tried.returncode else ""
    )


class Started:
    """A command on a host."""

    def __init__(self, host: "Host", process: subprocess.Popen[str], log: Path) -> None:
        self.host, self.process, self.log, self.began = host, process, log, time.monotonic()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> tuple[int, float]:
        """Exit status, and seconds until the command and every process of its host are gone."""
        began = time.monotonic()
        status = self.process.wait(seconds)
        while left := self.host.processes():
            assert time.monotonic() < began + seconds, f"{left} linger on {self.host.name}:\n{self.text}"
            time.sleep(0.1)
        return status, time.monotonic() - began

    def wait_for(self, words: str, seconds: float) -> float:
        """Seconds from the start until the log holds ``words``."""
        while words not in self.text:
            assert time.monotonic() < self.began + seconds, f"no {words!r}:\n{self.text}"
            assert self.process.poll() is None, f"ended without {words!r}:\n{self.text}"
            time.sleep(0.05)
        return time.monotonic() - self.began


class Host:
    """A host with an address, a name, an ``/etc/hosts`` and a disk of its own."""

    def __init__(self, name: str, address: str, namespace: str, folder: Path) -> None:
        self.name, self.address, self.namespace, self.folder = name, address, namespace, folder
        self.mark = f"{name}-{uuid.uuid4().hex}"
        self.started: list[Started] = []
        self.names = folder / f"{name}-etc-hosts"
        self.disk = folder / f"disk-of-{name}"
        self.disk.mkdir()

    def start(self, command: list[str], own_disk_at: Path | None = None, **env: str) -> Started:
        """Start ``command``; ``own_disk_at`` is a folder that the hosts do not share."""
        script = (
            'hostname "$1"; mount --bind "$2" /etc/hosts; [ -z "$3" ] || mount --bind "$4" "$3"; shift 4; exec "$@"'
        )
        inner = [
            "sh",
            "-ec",
            script,
            "sh",
            self.name,
            str(self.names),
            str(own_disk_at or ""),
            str(self.disk),
            *command,
        ]
        outer = ["ip", "netns", "exec", self.namespace, "unshare", "-m", "-u", "--propagation", "private"]
        log = self.folder / f"{self.name}-{len(self.started)}.log"
        environment = {key: value for key, value in os.environ.items() if "PROXY" not in key.upper()}
        environment |= {_MARK: self.mark, "TMPDIR": "/tmp", **env}
        with log.open("w") as out:
            process = subprocess.Popen([*outer, *inner], stdout=out, stderr=out, env=environment, text=True)
        self.started.append(Started(self, process, log))
        return self.started[-1]

    def processes(self) -> list[psutil.Process]:
        """All processes of this host, without those that are dead and not yet waited for."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
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
    """Hosts ``alpha`` (10.77.0.1) and ``beta`` (10.77.0.2)."""

    def __init__(self, folder: Path) -> None:
        mark = uuid.uuid4().hex[:6]
        self._links = [f"kit{mark}a", f"kit{mark}b"]
        self.alpha = Host("alpha", "10.77.0.1", f"kit-{mark}-a", folder)
        self.beta = Host("beta", "10.77.0.2", f"kit-{mark}-b", folder)
        self.both = (self.alpha, self.beta)
        _run("link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
        for host, link in zip(self.both, self._links, strict=True):
            _run("netns", "add", host.namespace)
            _run("link", "set", link, "netns", host.namespace)
            inside = ("-n", host.namespace)
            _run(*inside, "link", "set", link, "name", "eth7")
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth7")
            _run(*inside, "link", "set", "eth7", "up")
            _run(*inside, "link", "set", "lo", "up")
        known = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.both)
        for host in self.both:
            host.names.write_text(known)

    def cut(self) -> None:
        """Pull the cable."""
        _run("-n", self.alpha.namespace, "link", "set", "eth7", "down")

    def close(self) -> None:
        for host in self.both:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)  # and the cable with it


def _run(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
