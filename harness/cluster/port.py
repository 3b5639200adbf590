"""A node's end of the link: its network interface and address, and how others reach it.  No torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from harness.errors import Refusal

if TYPE_CHECKING:
    from harness.cluster.control_channel import Channel

_ANSWER_SECONDS: Final = 60.0  # of the first node, for a connection


@dataclass(frozen=True, slots=True)
class Port:
    """A node's end of the link: network interface, its IPv4 address, and namespace of its ranks."""

    interface: str | None  # name for gloo and for the byte counters; None leaves the choice to gloo
    address: str
    holder: int | None = None  # a process inside the node's network namespace; None is the host's own
    shaped_mbit: float | None = None  # to which its host holds the interface, through which NCCL has to send
    hcas: str = ""  # InfiniBand adapters that NCCL may use, separated by commas; empty leaves it the choice
    control: str = ""  # the keeper's Unix-domain socket (`opened`), where it can hold the link to no rate


def address_towards(host: str) -> str:
    """This machine's address from which ``host`` is reached, a Refusal if it is not; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refusal(f"host {host!r} cannot be reached: {error.strerror or error}") from error


def port_towards(channel: Channel) -> Port:
    """The interface of this host that leads to the other nodes, with its address; a Refusal if there is none.

    A node takes the address from which it reaches the first node, which takes that at which others reach it.
    """
    place = channel.place
    if (named := os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
        return Port(named, _address_of(named))
    if place.nodes == 1:
        return Port("lo", "127.0.0.1")
    if place.node == 0:
        address = str(channel.wait("reached", of=1))
    else:
        try:
            with socket.create_connection((place.host, place.port), timeout=_ANSWER_SECONDS) as connection:
                address, reached = connection.getsockname()[0], connection.getpeername()[0]
        except OSError as error:
            raise Refusal(f"node {place.node} cannot reach {place.host}:{place.port}: {error}") from error
        if place.node == 1:
            channel.post("reached", reached)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return Port(name, address)
    raise Refusal(f"no interface of node {place.node} has the address {address}; set GLOO_SOCKET_IFNAME")


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs().get(interface)
    if not found:
        raise Refusal(f"GLOO_SOCKET_IFNAME = {interface!r}: there is no such interface here")
    return next((one.address for one in found if one.family == socket.AF_INET), found[0].address)


def host_identity() -> str:
    """What two supervisors share only if they stand on one host, in one network namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text(encoding='ascii').strip()} {space.readlink()}"
    except OSError:
        return socket.gethostname()
