"""How machines reach each other: host names that resolve to loopback, own addresses, and interfaces."""

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from kit.system.errors import Problem


def address_of(name: str) -> str:
    """Return the first address of a host name, the one that gloo takes. Raises ``OSError`` if it has none."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def check_own_name() -> list[Problem]:
    """Check that other machines can reach the address of the own host name: gloo sends it to all ranks."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return []
    host = socket.gethostname()
    try:
        address = address_of(host)
    except OSError:
        found = f"{host}, the name of this machine, has no address"
    else:
        if not _is_loopback(address):
            return []
        found = f"{host}, the name of this machine, resolves to {address}: other machines cannot reach it"
    fix = (
        f"on {host}: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0, or what `ip addr` shows; or fix /etc/hosts"
    )
    return [Problem("host name", found, fix=fix)]


def check_main_address(name: str, where: str) -> list[Problem]:
    """Check that other machines can reach ``name``, the master node.

    Args:
        where: the setting that has the name.
    """
    fix = "give the address of the master node in the network, the same on every machine"
    try:
        address = address_of(name)
    except OSError as error:
        return [Problem(where, f"{name} has no address ({error.strerror or error})", fix=fix)]
    if _is_loopback(address):
        return [Problem(where, f"{name} resolves to {address}: other machines cannot reach it", fix=fix)]
    return []


def warnings_of_address(name: str, where: str) -> list[str]:
    """Warn if ``name``, the master node, resolves to an address of the public internet.

    Args:
        where: the setting that has the name.
    """
    with suppress(OSError):
        address = address_of(name)
        if ipaddress.ip_address(address.partition("%")[0]).is_global:
            found = f"{name} resolves to {address}, a public address: whoever reaches a run's ports can take part in it"
            return [f"warning: {where}: {found}. Use a private network (docs/multi-node-and-debugging.md)"]
    return []


def is_own(name: str) -> bool:
    """Return whether a name or address is that of this machine."""
    with suppress(OSError):
        address = address_of(name)
        return _is_loopback(address) or any(address == own for _, own in _own_addresses())
    return False


def use_loopback() -> None:
    """Let gloo in this process listen on loopback only: for a run on one machine, whatever interface is set."""
    if name := next((name for name, address in _own_addresses() if _is_loopback(address)), None):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _own_addresses() -> list[tuple[str, str]]:
    """(interface, address) for each IP address of this machine, IPv4 first."""
    found = [
        (entry.family, name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [(name, address) for _, name, address in sorted(found, key=lambda each: each[0] != socket.AF_INET)]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
