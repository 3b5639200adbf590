"""Describes the network interface through which a node sends, and finds the interface that leads to another host.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.errors import Refusal


@dataclass(frozen=True, slots=True)
class Port:
    """The network interface through which a node sends to other nodes, and how this interface's rate is limited."""

    interface: str | None  # network interface for gloo and for byte counters; None lets gloo choose
    address: str  # address of the interface
    # Id of a process in the node's network namespace; None for the host's namespace.
    holder: int | None = None
    # Rate to which the host limits the interface, in Mbit/s.  NCCL must then use this interface.  None for no limit.
    shaped_mbit: float | None = None
    # InfiniBand or RoCE adapters that NCCL may use, separated by commas; if empty, NCCL chooses.
    hcas: str = ""
    # Unix-domain socket of the process that limits the link's rate and can suspend the limit (`lift_rate`); empty if
    # there is no such process.
    control: str = ""


def address_towards(host: str) -> str:
    """Return the address of this machine from which it sends to ``host``.  Finding the address sends no message.

    Raises:
        Refusal: If the host's name is unknown, or if there is no route to the host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refusal(
            f"host {host!r} cannot be reached: {error.strerror or error}; name a host that this machine can reach"
        ) from error


def port_towards(host: str) -> Port:
    """Return the interface of this machine that leads to ``host``, as a :class:`Port`.

    If the environment variable ``GLOO_SOCKET_IFNAME`` names an interface of this machine, that interface is returned
    instead.

    Raises:
        Refusal: If this machine has no interface of that name, if no interface has the address from which this machine
            sends to ``host``, if the host's name is unknown, or if there is no route to the host.
    """
    interfaces, chosen = psutil.net_if_addrs(), os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        if not (entries := interfaces.get(chosen)):
            raise Refusal(
                f"GLOO_SOCKET_IFNAME = {chosen!r}: this host has no such interface: name one that it has, or unset "
                "the variable"
            )
        entry = next((entry for entry in entries if entry.family == socket.AF_INET), entries[0])
        return Port(chosen, entry.address)
    address = address_towards(host)
    for name, entries in interfaces.items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return Port(name, address)
    raise Refusal(
        f"no interface of this host has the address {address}; set GLOO_SOCKET_IFNAME to an interface's name"
    )


def host_identity() -> str:
    """Return a text that is equal in two processes if, and only if, they share a host and a network namespace.

    On a system without ``/proc``, this is the host's name; network namespaces are then not told apart.
    """
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text(encoding='ascii').strip()} {space.readlink()}"
    except OSError:
        return socket.gethostname()
