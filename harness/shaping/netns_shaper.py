"""Makes a network namespace for each node, and a link with a limited rate between them.

The module runs as a keeper (:mod:`harness.shaping.keeper`), a child process that holds these resources until it ends.
Every node is an anonymous network namespace, which a small child of the keeper holds open; nothing is created in the
host's own namespace.  Two nodes are joined by one veth pair, more nodes by a bridge in the keeper's own namespace.
When the keeper ends, the kernel kills its children (``PR_SET_PDEATHSIG``).  When the last process inside a namespace
ends, the kernel removes the namespace and its interfaces.  Without root, the keeper makes all namespaces and interfaces
inside a user namespace of its own.

A ``tbf`` queue (token bucket filter) limits what leaves each interface.  The limit can be lifted for messages that are
not timed: as long as a process is connected to the keeper's Unix-domain socket, the link has no rate.  When that
process closes its side of the connection, or dies, the rate is restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES
from harness.shaping import socket_folder
from harness.shaping.keeper import report_errors, send_answer

CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1

LOOPBACK: Final = "lo"
MTU: Final = 1500  # bytes of a packet
_NETWORK: Final = "10.77.0.0/16"  # 65,533 nodes
# Congestion control of the link: Reno, which every kernel has.  The host's default may be BBR, which is slow when both
# directions are full: on a link of 50 Mbit/s, messages of 1.25 MB in both directions ran at 26 to 49 Mbit/s under BBR,
# and at 47.6 to 48.5 Mbit/s under Reno.  Reno is set on the route, since /proc/sys may be read-only.
CONGESTION: Final = "reno"
# The queue holds as many bytes as its rate sends in this time.  A shorter queue drops packets when several ranks send
# at once.
QUEUE_SECONDS: Final = 0.4
# netem holds at most this many packets and drops all others; its default is 1000.
_DELAYED_PACKETS: Final = 100_000
_TBF: Final = "10:"  # handle of the queue that limits an interface's rate
_OPEN_RATE: Final = 4_000_000_000  # bytes per second: close to tbf's maximum, and more than any CPU sends
_OPEN_BURST: Final = 4_000_000  # bytes
OPEN: Final = b"open"
SHAPED: Final = b"shaped"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Shape(NamedTuple):
    """Parameters of a ``tbf`` queue."""

    rate: int  # bytes per second
    burst: int  # bytes that may leave at once after a pause
    limit: int  # bytes that wait before packets are dropped
    segment: int  # largest packet handed to the queue (``gso_max_size``); the queue would cut packets above its burst


def shape(rate_mbit: float) -> Shape:
    """Return the parameters of the ``tbf`` queue that limits an interface to a rate.

    The burst is the number of bytes that ``tbf`` lets pass at once after a pause.  A large burst would let short
    messages run faster than the rate, so the burst is small:

    - below 12 Mbit/s: 6 kB, which take 49 ms at 1 Mbit/s;
    - from 12 to 260 Mbit/s: what the rate sends in 4 ms;
    - from 260 Mbit/s to 1 Gbit/s: 131 kB;
    - above 1 Gbit/s: what the rate sends in 1 ms.

    The largest packet (``segment``) is at most half a burst, so that every packet fits into a burst.  If a packet
    exceeded the burst, ``tbf`` would cut it into packets of the MTU's size, whose headers would take 5 % of the rate.
    """
    rate = max(1, round(rate_mbit * 1e6 / 8))
    segment = int(min(max(rate * 0.002, 2 * MTU), 65536))
    burst = int(max(2 * (segment + HEADER_BYTES), rate * 0.001))
    return Shape(rate=rate, burst=burst, limit=int(burst + rate * QUEUE_SECONDS), segment=segment)


class _Queue(NamedTuple):
    """The queue of packets that leave one interface of the link."""

    process: int  # a process inside the interface's network namespace
    interface: str
    shape: Shape | None  # None for no rate
    latency_ms: float = 0.0  # delay of each packet


def _address(node: int) -> str:
    """Return the IPv4 address of a node."""
    return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"


def _check(result: int, call: str) -> None:
    """Raise an OSError if a system call's ``result`` is not 0; ``call`` names the call in the error."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _setns(file: IO[bytes], kind: int) -> None:
    _check(_LIBC.setns(file.fileno(), kind), f"setns({Path(file.name).name})")  # os.setns is of Python 3.12


def enter(process: int) -> None:
    """Move this process, which must be single-threaded, into the user and network namespaces of ``process``.

    Raises:
        LinkError: If the kernel does not allow it, or the process has ended.
    """
    namespaces = Path(f"/proc/{process}/ns")
    try:
        # Both files are opened before the first move, because it changes this process's rights in /proc.
        with (namespaces / "user").open("rb") as user, (namespaces / "net").open("rb") as net:
            if not (namespaces / "user").samefile("/proc/self/ns/user"):
                _setns(user, CLONE_NEWUSER)
            _setns(net, CLONE_NEWNET)
    except OSError as error:
        raise LinkError(
            f"cannot enter the network namespace that process {process} keeps: {error}; run the trial again"
        ) from error


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process with id ``parent``, ends.

    Call this function only after this process has entered its namespaces, since entering a namespace undoes the call.
    """
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _enter_own_namespace() -> str:
    """Move this process into a new network namespace, inside a new user namespace if that is necessary.

    A user namespace is necessary if this process has no right to make network namespaces.

    Returns:
        ``root`` if only a network namespace was made, ``rootless`` if a user namespace was made too.
    """
    try:
        _check(_LIBC.unshare(CLONE_NEWNET), "unshare(NEWNET)")
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    else:
        return "root"
    user, group = os.getuid(), os.getgid()
    _check(_LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET), "unshare(NEWUSER|NEWNET)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return "rootless"


@contextlib.contextmanager
def _netlink(process: int) -> Iterator[Any]:
    """Yield a netlink socket that works in the network namespace of ``process``.

    A netlink socket belongs to the namespace in which it was opened.  This process is therefore in that namespace while
    the body of ``with`` runs, and returns afterwards.
    """
    from pyroute2 import IPRoute

    with Path("/proc/self/ns/net").open("rb") as before, Path(f"/proc/{process}/ns/net").open("rb") as inside:
        _setns(inside, CLONE_NEWNET)
        try:
            with IPRoute() as route:
                yield route
        finally:
            _setns(before, CLONE_NEWNET)


def _set(queue: _Queue, state: bytes | None = None) -> None:
    """Create an interface's queue, or lift or restore the rate limit of a queue that exists.

    Args:
        queue: The queue.
        state: None creates the queue and sets the interface's largest packet size.  ``OPEN`` lifts the queue's rate
            limit, and ``SHAPED`` restores it.  Both leave the largest packet size as it is, since a TCP connection
            keeps the size that it began with.
    """
    with _netlink(queue.process) as route:
        index, shape = route.link_lookup(ifname=queue.interface)[0], queue.shape
        if state is None and queue.latency_ms:
            delay = {"delay": round(queue.latency_ms * 1e3), "limit": _DELAYED_PACKETS}  # in microseconds
            try:
                route.tc("add", "netem", index, handle="1:", **delay)
            except Exception as error:
                message = (
                    f"a latency of {queue.latency_ms:g} ms needs netem, which the kernel lacks ({error}): run modprobe "
                    "sch_netem, or remove cluster.latency"
                )
                raise OSError(message) from error
        if shape is None:
            return
        if state is None:
            route.link("set", index=index, gso_max_size=shape.segment)
        elif state == OPEN:
            shape = shape._replace(rate=_OPEN_RATE, burst=_OPEN_BURST)
        below = {"parent": "1:1"} if queue.latency_ms else {}  # packets pass netem first, then tbf
        rates = {"rate": shape.rate, "burst": shape.burst, "limit": shape.limit}
        route.tc("change" if state else "add", "tbf", index, handle=_TBF, **rates, **below)


def _hold() -> int:
    """Make a new network namespace, fork a child that holds it open, and return the child's process id."""
    keeper = os.getpid()
    with Path("/proc/self/ns/net").open("rb") as before:
        _check(_LIBC.unshare(CLONE_NEWNET), "unshare(NEWNET)")
        if not (holder := os.fork()):
            try:
                os.close(0)  # standard input must have one reader, so that its end is noticed
                die_with_parent(keeper)
                signal.pause()
            finally:
                os._exit(1)
        _setns(before, CLONE_NEWNET)
    return holder


def _join(prefix: str, names: Sequence[str], holders: Sequence[int]) -> list[str]:
    """Make an interface for each node in the node's network namespace, and join the interfaces.

    Two nodes share a veth pair.  More nodes get a bridge with a port towards each node.

    Args:
        prefix: Beginning of the names of the bridge and of its ports.
        names: Names of the nodes' interfaces.
        holders: For each node, the process that holds the node's network namespace open.

    Returns:
        The names of the bridge's ports; empty for two nodes.
    """
    with _netlink(os.getpid()) as route:
        if len(holders) == 2:
            peer = {"ifname": names[1], "net_ns_pid": holders[1]}
            route.link("add", ifname=names[0], kind="veth", peer=peer)
            route.link("set", index=route.link_lookup(ifname=names[0])[0], net_ns_pid=holders[0])
            return []
        ports, bridge = [f"{prefix}p{node}" for node in range(len(holders))], f"{prefix}br"
        route.link("add", ifname=bridge, kind="bridge")
        master = route.link_lookup(ifname=bridge)[0]
        route.link("set", index=master, state="up")
        for port, name, holder in zip(ports, names, holders, strict=True):
            route.link("add", ifname=port, kind="veth", peer={"ifname": name, "net_ns_pid": holder})
            route.link("set", index=route.link_lookup(ifname=port)[0], master=master, state="up")
        return ports


def _configure(node: int, name: str, holder: int, *, inner: bool) -> None:
    """Give a node its address and its route to all other nodes.

    Args:
        node: Number of the node.
        name: Name of the node's interface.
        holder: The process that holds the node's network namespace open.
        inner: Whether the rate between the node's own ranks will be limited too.  Their messages pass the loopback
            interface, whose packets are then made as small as those between nodes.
    """
    network, _, prefix = _NETWORK.partition("/")
    with _netlink(holder) as route:
        loopback, index = (route.link_lookup(ifname=interface)[0] for interface in (LOOPBACK, name))
        # Packets on the loopback get the same size as between nodes, so that the loopback's queue does not cut them.
        if inner:
            route.link("set", index=loopback, mtu=MTU)
        route.link("set", index=loopback, state="up")
        route.addr("add", index=index, address=_address(node), prefixlen=int(prefix))
        route.link("set", index=index, state="up")
        route.route(
            "replace",
            dst=f"{network}/{prefix}",
            oif=index,
            prefsrc=_address(node),
            proto="kernel",
            scope="link",
            metrics={"cc_algo": CONGESTION},
        )


def _stdin_ends_before(ready: socket.socket) -> bool:
    """Wait until the socket ``ready`` can be read or standard input ends; return whether standard input has ended."""
    return sys.stdin in select.select([sys.stdin, ready], [], [])[0]


def _serve(queues: Sequence[_Queue], listening: socket.socket) -> None:
    """Wait for processes that ask for the link's rate limit to be lifted, until standard input ends.

    A process asks by connecting to the socket ``listening``.  The limit is lifted until the asking process closes the
    connection; then the next process is served.  ``queues`` are the queues that limit the rate.  If the limit cannot be
    restored, the error ends this keeper (the process that holds the link) and so removes the link.  No trial can then
    run without the limit.
    """
    while not _stdin_ends_before(listening):
        with listening.accept()[0] as client:
            for state in (OPEN, SHAPED):
                for queue in queues:
                    _set(queue, state)
                with contextlib.suppress(OSError):  # the client may have died
                    client.sendall(state)
                if state == OPEN and _stdin_ends_before(client):
                    return


def _keep(prefix: str, rates: Sequence[float | None], latency_ms: float, inner_mbit: float | None) -> None:
    """Make the namespaces and the link, describe them to the parent, and hold them until standard input ends.

    Args:
        prefix: Beginning of the interfaces' names.
        rates: Each node's rate in Mbit/s; None for no rate.
        latency_ms: Delay in milliseconds of packets that leave a node.
        inner_mbit: Rate in Mbit/s between the ranks of a node; None for no rate.
    """
    mode, nodes = _enter_own_namespace(), range(len(rates))
    names, holders = [f"{prefix}n{node}" for node in nodes], [_hold() for _ in nodes]
    ports = _join(prefix, names, holders)
    shapes = [None if rate is None else shape(rate) for rate in rates]
    queues = [_Queue(holders[node], names[node], shapes[node], latency_ms) for node in nodes]
    queues += [_Queue(os.getpid(), port, queue) for port, queue in zip(ports, shapes, strict=False)]
    if inner_mbit is not None:
        queues += [_Queue(holder, LOOPBACK, shape(inner_mbit)) for holder in holders]
    for node in nodes:
        _configure(node, names[node], holders[node], inner=inner_mbit is not None)
    for queue in queues:
        _set(queue)
    with (
        socket_folder.new() as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(control := str(folder / "link"))
        listening.listen()
        node_ports = list(zip(names, map(_address, nodes), holders, strict=True))
        send_answer({"mode": mode, "ports": node_ports, "control": control if any(shapes) else ""})
        _serve(queues, listening)


if __name__ == "__main__":
    with report_errors():
        _keep(*json.loads(sys.argv[1]))
