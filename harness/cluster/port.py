"""A node's end of the link: its network interface and address, and how others reach it.  No torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.errors import Refusal


@dataclass(frozen=True, slots=True)
class Port:
    """A node's end of the link: network interface, its address, and namespace of its ranks."""

    interface: str | None  # name for gloo and for the byte counters; None leaves the choice to gloo
    address: str
    holder: int | None = None  # a process inside the node's network namespace; None is the host's own
    shaped_mbit: float | None = None  # rate to which its host holds the interface that NCCL has to use
    hcas: str = ""  # InfiniBand adapters that NCCL may use, separated by commas; empty leaves it the choice
    control: str = ""  # the keeper's Unix-domain socket (`lift_rate`), where it can lift the link's rate


def address_towards(host: str) -> str:
    """This machine's address from which ``host`` is reached, a Refusal if it is not; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refusal(f"host {host!r} cannot be reached: {error.strerror or error}") from error


def port_towards(host: str) -> Port:
    """The interface of this host that leads to ``host``, with its address; a Refusal if there is none."""
    interfaces, chosen = psutil.net_if_addrs(), os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        if not (entries := interfaces.get(chosen)):
            raise Refusal(f"GLOO_SOCKET_IFNAME = {chosen!r}: there is no such interface here")
        entry = next((entry for entry in entries if entry.family == socket.AF_INET), entries[0])
        return Port(chosen, entry.address)
    address = address_towards(host)
    for name, entries in interfaces.items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return Port(name, address)
    raise Refusal(f"no interface of this host has the address {address}; set GLOO_SOCKET_IFNAME")


def host_identity() -> str:
    """A text that two supervisors share only if they run on one host, in one network namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text(encoding='ascii').strip()} {space.readlink()}"
    except OSError:
        return socket.gethostname()
