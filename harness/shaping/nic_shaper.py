"""Limits the rate of a network interface of this host with a ``tbf`` queue (token bucket filter).

The module runs as a keeper (:mod:`harness.shaping.keeper`), a child process that holds the queue until it ends.  The
keeper replaces the kernel's default queue.  It removes its own queue in each of these cases: its parent asks it to end,
the parent ends or is killed by ``kill -9``, or the keeper gets SIGTERM or SIGHUP.  If the keeper itself is killed by
``kill -9``, its queue stays, and the next run prints the command that removes the queue.  Limiting an interface needs
root, or CAP_NET_ADMIN.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness.errors import LinkError
from harness.shaping.keeper import Keeper, report_errors, send_answer
from harness.shaping.netns_shaper import shape

_HANDLE: Final = 0x5A50  # handle of our queue, by which the next run recognises it
_ROOT: Final = 0xFFFFFFFF  # parent handle of the queue through which all packets leave
_INGRESS: Final = 0xFFFF  # handle of hooks on arriving packets, which delay nothing
_LOOPBACK: Final = 0x8  # IFF_LOOPBACK
_ENDED_BY: Final = (signal.SIGTERM, signal.SIGHUP)
_REMOVAL_SECONDS: Final = 30.0
_USUAL_SEGMENT: Final = (
    65536  # the kernel's default for the largest packet in bytes, unless the driver allows less
)
_LARGEST: Final = 2**32  # bytes per second, the limit of tbf's netlink message


def removal(name: str, segment: int) -> str:
    """Return, for an error message, the command that removes our queue from an interface.

    Args:
        name: Name of the interface.
        segment: The interface's usual largest packet (``gso_max_size``) in bytes, which the command restores.
    """
    return (
        f"remove the queue with: tc qdisc del dev {name} root; ip link set dev {name} gso_max_size {segment}"
    )


@contextlib.contextmanager
def shaped_interface(interface: str, rate_mbit: float, others: list[str]) -> Iterator[dict[str, Any]]:
    """Limit the rate of a network interface while the body of ``with`` runs.

    Args:
        interface: Name of the interface.
        rate_mbit: The rate in Mbit/s.
        others: Addresses of the other nodes, which must be reached through this interface.

    Yields:
        A dict of facts about the interface before the change, and about the host:

        - ``interface``: its name;
        - ``mtu``: its MTU in bytes;
        - ``segment``: its largest packet in bytes before the change;
        - ``before``: the kind of its queue before the change;
        - ``congestion``: the host's congestion control.

    Raises:
        LinkError: If the rate cannot be limited.  Also if the limit could not be removed after the body; the message
            then has the command that removes it.
    """
    try:
        keeper = Keeper("harness.shaping.nic_shaper", json.dumps([interface, rate_mbit, others]))
    except LinkError as error:
        raise LinkError(f"cluster.link = 'shaped': {error}") from None
    try:
        yield keeper.answer
    finally:
        reason = keeper.end(_REMOVAL_SECONDS) or "its keeper was killed"
        if keeper.process.returncode:
            advice = removal(interface, keeper.answer["segment"])
            raise LinkError(f"the rate of {interface} may still be limited ({reason}); {advice}")


@contextlib.contextmanager
def _shaped(interface: str, rate_mbit: float, others: list[str]) -> Iterator[dict[str, Any]]:
    from pyroute2 import IPRoute, NetlinkError

    with IPRoute() as route:
        index = (route.link_lookup(ifname=interface) or [0])[0]
        if not index:
            raise OSError(
                f"there is no interface {interface!r}; set GLOO_SOCKET_IFNAME to an interface of this host"
            )
        (link,) = route.get_links(index)
        mtu, segment = link.get_attr("IFLA_MTU"), link.get_attr("IFLA_GSO_MAX_SIZE")
        tbf = shape(rate_mbit)
        if link["flags"] & _LOOPBACK:
            raise OSError(
                f"{interface} is the loopback interface: set GLOO_SOCKET_IFNAME to an interface that other nodes reach"
            )
        if tbf.rate >= _LARGEST:
            raise OSError(
                f"a rate of {rate_mbit:g} Mbit/s is more than a tbf queue allows; set cluster.rate below "
                f"{8e-6 * _LARGEST:.0f} Mbit/s"
            )
        if mtu > tbf.segment:
            raise OSError(
                f"{interface} has packets of up to {mtu} bytes, but a queue of {rate_mbit:g} Mbit/s accepts packets of "
                f"at most {tbf.segment} bytes; set cluster.rate to {mtu * 4e-3:g} Mbit/s or more"
            )
        for other in others:
            _check_route(route, index, interface, other)
        usual = min(_USUAL_SEGMENT, link.get_attr("IFLA_TSO_MAX_SIZE") or _USUAL_SEGMENT)
        before = _queue_before(route, index, interface, usual)
        # Signals wait here.  A signal after a change, but before its undo is registered, would leave the change behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
        with contextlib.ExitStack() as undo:
            try:
                route.link("set", index=index, gso_max_size=min(segment, tbf.segment))
            except NetlinkError as error:
                why = "shaping needs root or CAP_NET_ADMIN" if error.code == errno.EPERM else str(error)
                raise OSError(f"{interface} cannot be shaped: {why}; set cluster.link = 'paced'") from error
            undo.callback(route.link, "set", index=index, gso_max_size=segment)
            handle = f"{_HANDLE:x}:"
            route.tc("add", "tbf", index, handle=handle, rate=tbf.rate, burst=tbf.burst, limit=tbf.limit)
            undo.callback(route.tc, "del", index=index, handle=handle, parent=_ROOT)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDED_BY)
            yield {
                "interface": interface,
                "mtu": mtu,
                "segment": segment,
                "before": before,
                "congestion": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
            }


def _check_route(route: Any, index: int, interface: str, other: str) -> None:
    """Check that messages to another node leave through an interface.

    Args:
        route: A netlink socket.
        index: Number of the interface.
        interface: Name of the interface, for error messages.
        other: IP address of the other node.

    Raises:
        OSError: If there is no route to the address, or if the route leaves through another interface.
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    try:
        leaving = route.route("get", dst=other, family=family)[0].get_attr("RTA_OIF")
    except Exception as error:
        raise OSError(
            f"there is no route to {other}: {error}; add a route, or correct the node's address"
        ) from error
    if leaving != index:
        name = route.get_links(leaving)[0].get_attr("IFLA_IFNAME")
        raise OSError(
            f"messages to {other} leave through {name}, but the rate of {interface} is limited; change the route, or "
            f"set GLOO_SOCKET_IFNAME to {name}"
        )


def _queue_before(route: Any, index: int, interface: str, segment: int) -> str:
    """Check that an interface has only the kernel's default queue, and return the kind of this queue.

    Args:
        route: A netlink socket.
        index: Number of the interface.
        interface: Name of the interface, for error messages.
        segment: The interface's usual largest packet in bytes, for error messages.

    Raises:
        OSError: If the interface has a queue that someone has set up, or that another run has left.
    """
    default = ""
    for queue in route.get_qdiscs(index):
        kind, major = queue.get_attr("TCA_KIND"), queue["handle"] >> 16
        if major == _HANDLE:
            raise OSError(
                f"{interface} has the queue of another run, which is still running or was killed; if it was killed, "
                f"{removal(interface, segment)}"
            )
        if major not in (0, _INGRESS):
            raise OSError(
                f"{interface} has the queue '{kind} {major:x}:', which is not the kernel's default; zeropp does not "
                f"replace it: remove the queue with tc qdisc del dev {interface} root"
            )
        default = kind if queue["parent"] == _ROOT else default
    return default


def _leave(*_: object) -> None:
    """End this process, whose clean-up then removes its queue and restores the interface's largest packet size.

    SIGTERM and SIGHUP are ignored from now on, so that they cannot interrupt this clean-up.  The function is also the
    handler of these signals; it does not use a handler's arguments.
    """
    for number in _ENDED_BY:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    sys.exit(0)


def main() -> None:
    """Run the keeper, the process that limits the rate of the interface that its request names.

    The limit stays until standard input closes.  The request is the only command-line argument.
    """
    for number in _ENDED_BY:
        signal.signal(number, _leave)
    with report_errors(), _shaped(*json.loads(sys.argv[1])) as interface:
        send_answer(interface)
        os.read(0, 1)
        _leave()


if __name__ == "__main__":
    main()
