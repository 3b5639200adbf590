"""Holds an interface of this host to a rate, through a process that takes the queue away again (the keeper).

As ``python -m harness.cluster.nic_shaper REQUEST``, a :class:`Request` as JSON, it puts a ``tbf`` queue
where the kernel's default one is, answers with one JSON line, and removes the queue when its standard input
closes: when the supervisor lets go, ends or is killed by ``kill -9``; and at SIGTERM or SIGHUP.  Where the
keeper itself is killed by ``kill -9``, as with all of its job, the queue stays, and the next run says what
removes it.  It needs root, or CAP_NET_ADMIN.  No torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from harness.cluster.link import LinkError, answer_of, end_keeper, shape, start_keeper
from harness.cluster.netns_shaper import KeeperError

_HANDLE: Final = 0x5A50  # of our queue, by which the next run knows it
_ROOT: Final = 0xFFFFFFFF  # parent of the queue that takes all that leaves
_INGRESS: Final = 0xFFFF  # handle of hooks on what arrives, which hold nothing back
_LOOPBACK: Final = 0x8  # IFF_LOOPBACK
_ENDED_BY: Final = (signal.SIGTERM, signal.SIGHUP)
_REMOVAL_SECONDS: Final = 30.0
_USUAL_SEGMENT: Final = 65536  # bytes of a packet, where the driver takes as much
_LARGEST: Final = 2**32  # bytes per second that tbf's netlink message can say


@dataclass(frozen=True, slots=True)
class Request:
    """Request to hold what leaves ``interface``, which leads to the addresses ``others``, to a rate."""

    interface: str
    rate_mbit: float
    others: list[str]


def removal(interface: str, segment: int) -> str:
    """How to remove what a killed keeper has left; ``segment``: bytes of a packet that the interface had."""
    return (
        f"remove it by: tc qdisc del dev {interface} root; ip link set dev {interface} gso_max_size {segment}"
    )


class ShapedInterface:
    """A shaped interface of this host; a context manager that takes the queue away."""

    def __init__(self, request: Request) -> None:
        """Shape it; a LinkError says why it may not be."""
        # ``interface``, its ``mtu``, largest ``segment``, queue ``before``; the host's ``congestion``
        self.found: dict[str, Any] = {}
        self._keeper: subprocess.Popen[str] = start_keeper(
            "harness.cluster.nic_shaper", json.dumps(asdict(request))
        )
        try:
            self.found = answer_of(self._keeper, "link 'shaped'")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the queue away; a LinkError if it may still be there, with what removes it."""
        words = end_keeper(self._keeper, _REMOVAL_SECONDS).strip().splitlines()
        if self._keeper.returncode and self.found:
            why, name = " ".join(words[-1:]) or "its keeper was killed", self.found["interface"]
            raise LinkError(f"{name} may still be shaped ({why}); {removal(name, self.found['segment'])}")


@contextlib.contextmanager
def _shaped(asked: Request) -> Iterator[dict[str, Any]]:
    from pyroute2 import IPRoute, NetlinkError

    with IPRoute() as route:
        index = (route.link_lookup(ifname=asked.interface) or [0])[0]
        if not index:
            raise KeeperError(f"there is no interface {asked.interface!r}")
        (link,) = route.get_links(index)
        mtu, segment = link.get_attr("IFLA_MTU"), link.get_attr("IFLA_GSO_MAX_SIZE")
        form = shape(asked.rate_mbit)
        if link["flags"] & _LOOPBACK:
            raise KeeperError(f"{asked.interface} is the loopback: no network joins these nodes")
        if form.rate >= _LARGEST:
            raise KeeperError(f"{asked.rate_mbit:g} Mbit/s are more than a tbf queue's {8e-6 * _LARGEST:.0f}")
        if mtu > form.segment:
            raise KeeperError(
                f"{asked.interface} has packets of {mtu} bytes, which at {asked.rate_mbit:g} Mbit/s have "
                f"at most {form.segment}; ask for {mtu * 4e-3:g} Mbit/s or more"
            )
        for other in asked.others:
            _check_way(route, index, asked.interface, other)
        usual = min(_USUAL_SEGMENT, link.get_attr("IFLA_TSO_MAX_SIZE") or _USUAL_SEGMENT)
        before = _queue_before(route, index, asked.interface, usual)
        # A signal between a change and the note of it would leave the change behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
        try:
            route.link("set", index=index, gso_max_size=min(segment, form.segment))
        except NetlinkError as error:
            why = "it needs root, or CAP_NET_ADMIN" if error.code == errno.EPERM else str(error)
            raise KeeperError(f"{asked.interface} cannot be shaped: {why}") from error
        handle, queued = f"{_HANDLE:x}:", False
        try:
            route.tc("add", "tbf", index, handle=handle, rate=form.rate, burst=form.burst, limit=form.limit)
            queued = True
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDED_BY)
            yield {
                "interface": asked.interface,
                "mtu": mtu,
                "segment": segment,
                "before": before,
                "congestion": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
            }
        finally:
            if queued:
                route.tc("del", index=index, handle=handle, parent=_ROOT)
            route.link("set", index=index, gso_max_size=segment)


def _check_way(route: Any, index: int, interface: str, other: str) -> None:
    """Refuse an address that messages reach past the interface, where no queue of ours would hold them."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    try:
        leaves = route.route("get", dst=other, family=family)[0].get_attr("RTA_OIF")
    except Exception as error:
        raise KeeperError(f"there is no way to {other}: {error}") from error
    if leaves != index:
        by = route.get_links(leaves)[0].get_attr("IFLA_IFNAME")
        raise KeeperError(f"messages to {other} leave by {by}, which is not shaped, and not by {interface}")


def _queue_before(route: Any, index: int, interface: str, segment: int) -> str:
    """Name of the kernel's own queue, whose handle is 0; any that somebody has set up is refused."""
    default = ""
    for queue in route.get_qdiscs(index):
        kind, major = queue.get_attr("TCA_KIND"), queue["handle"] >> 16
        if major == _HANDLE:
            raise KeeperError(
                f"{interface} has the queue of another run, which is under way or was killed; if it was, "
                f"{removal(interface, segment)}"
            )
        if major not in (0, _INGRESS):
            raise KeeperError(
                f"{interface} has a queue that is not the kernel's own and is not replaced: {kind} {major:x}:"
            )
        default = kind if queue["parent"] == _ROOT else default
    return default


def _leave(*_: object) -> None:
    for number in _ENDED_BY:
        signal.signal(number, signal.SIG_IGN)  # what ends the keeper is not disturbed
    sys.exit(0)


def main() -> None:
    """Answer the request, and hold the interface until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when a Ctrl-C ends the link
    for number in _ENDED_BY:
        signal.signal(number, _leave)
    answered = False
    try:
        with _shaped(Request(**json.loads(sys.argv[1]))) as answer:
            print(json.dumps(answer), flush=True)
            answered = True
            os.read(0, 1)
            _leave()
    except Exception as error:  # reported to the supervisor, whatever netlink raised
        if answered:
            raise
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
