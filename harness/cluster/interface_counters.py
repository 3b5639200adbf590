"""Bytes and packets that a network interface has sent, as the kernel counts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.cluster.link import LinkError


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a network interface: bytes and packets sent."""

    tx_bytes: int
    tx_packets: int

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.tx_bytes + other.tx_bytes, self.tx_packets + other.tx_packets)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.tx_bytes - other.tx_bytes, self.tx_packets - other.tx_packets)


def counters(interface: str, process: int | Literal["self"] = "self") -> Counters:
    """Read the counters of ``interface``, which must be there, in the network namespace of ``process``.

    Not ``/sys/class/net``, which shows the outer interfaces in a rootless namespace.

    Raises:
        LinkError: if there is no such interface.
    """
    for line in Path(f"/proc/{process}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return Counters(tx_bytes=int(columns[8]), tx_packets=int(columns[9]))
    raise LinkError(f"process {process} sees no interface {interface!r}")
