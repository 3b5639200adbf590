"""Keeper (:mod:`harness.cluster.keeper`) of the nodes' network namespaces and the shaped link between them.

Every node is an anonymous network namespace, held by a small child of this process; nothing is made in the
namespace of the host.  Two nodes are joined by one veth pair, more by a bridge in the keeper's own namespace.
When the keeper goes, its children go (``PR_SET_PDEATHSIG``), and with the last process inside, the kernel
removes namespaces and interfaces.  Without root it makes them inside a user namespace of its own.

While a process is connected to its Unix-domain socket, the link is held to no rate: messages that are not
timed need not wait for it.  When that process closes its side, or dies, the link is shaped again.
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
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from harness.cluster.keeper import answer, keeping
from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES

CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1

LOOPBACK: Final = "lo"
MTU: Final = 1500  # bytes
_NETWORK: Final = "10.77.0.0/16"  # 65,533 nodes
# The host's default may be BBR, whose model of the path breaks when both directions are full: a
# 1.25 MB message each way at 50 Mbit/s ran at 26 to 49 Mbit/s under BBR and at 47.6 to 48.5 under Reno,
# which every kernel has.  Set on the route, since /proc/sys may be read-only.
CONGESTION: Final = "reno"
QUEUE_SECONDS: Final = 0.4  # shorter queues drop packets when several ranks send at once
_DELAYED_PACKETS: Final = 100_000  # that netem holds at once; its own default drops above 1000
_TBF: Final = "10:"  # handle of the queue that holds an interface to its rate
_OPEN_RATE: Final = 4_000_000_000  # bytes per second: near the most that tbf can say, more than any CPU sends
_OPEN_BURST: Final = 4_000_000  # bytes
_DRAIN_SECONDS: Final = 5.0
OPEN: Final = b"open"
SHAPED: Final = b"shaped"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Shape(NamedTuple):
    """Parameters of a ``tbf`` queue."""

    rate: int  # bytes per second
    burst: int  # bytes that may leave at once after a pause
    limit: int  # bytes that wait before packets are dropped
    segment: int  # largest packet handed to the queue (``gso_max_size``), which cuts those above the burst


def shape(rate_mbit: float) -> Shape:
    """Sizes of the ``tbf`` queue for a rate.

    The burst is worth about 4 ms of the rate (1 ms above 1 Gbit/s), so that messages of 50 ms
    and more run at the rate, not on saved tokens; packets are kept at half a burst, so that
    ``tbf`` does not cut them into MTU-sized ones, which costs 5 % in headers.
    """
    rate = max(1, round(rate_mbit * 1e6 / 8))
    segment = int(min(max(rate * 0.002, 2 * MTU), 65536))
    burst = int(max(2 * (segment + HEADER_BYTES), rate * 0.001))
    return Shape(rate=rate, burst=burst, limit=int(burst + rate * QUEUE_SECONDS), segment=segment)


@dataclass(frozen=True, slots=True)
class Request:
    """Request to the keeper for one namespace a shape; interface names start with ``prefix``."""

    prefix: str
    shapes: Sequence[Shape | None]  # of the link of each node, both ways
    latency_ms: float = 0.0  # that packets leave a node later
    inner: Shape | None = None  # of a node's loopback, through which its ranks reach each other


def address(node: int) -> str:
    """The IPv4 address of a node."""
    return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"


def interface(prefix: str, node: int) -> str:
    """The name of a node's interface."""
    return f"{prefix}n{node}"


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _setns(file: IO[bytes], kind: int) -> None:
    _check(_LIBC.setns(file.fileno(), kind), f"setns({Path(file.name).name})")  # os.setns is of Python 3.12


def enter(process: int) -> None:
    """Move this process, which must be single-threaded, into namespaces of ``process``; or a LinkError."""
    there, same = Path(f"/proc/{process}/ns"), Path("/proc/self/ns/user")
    try:
        # Both are opened before the first move: afterwards /proc is seen with other rights.
        with (there / "user").open("rb") as user, (there / "net").open("rb") as net:
            if not (there / "user").samefile(same):
                _setns(user, CLONE_NEWUSER)
            _setns(net, CLONE_NEWNET)
    except OSError as error:
        raise LinkError(f"cannot enter the namespaces of process {process}: {error}") from error


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; call *after* entering namespaces."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _enter_own_namespace() -> str:
    """Enter a new network namespace, via a user namespace if needed; returns ``root`` or ``rootless``."""
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
    """A netlink socket in the network namespace of ``process``: it belongs to that in which it was opened."""
    from pyroute2 import IPRoute

    with Path("/proc/self/ns/net").open("rb") as own, Path(f"/proc/{process}/ns/net").open("rb") as there:
        _setns(there, CLONE_NEWNET)
        try:
            with IPRoute() as route:
                yield route
        finally:
            _setns(own, CLONE_NEWNET)


def _shape(route: Any, index: int, shape: Shape | None, latency_ms: float = 0.0) -> None:
    """Queue what leaves an interface: ``netem`` delays it, ``tbf`` below holds it to the rate."""
    if latency_ms:
        delay = {"delay": round(latency_ms * 1e3), "limit": _DELAYED_PACKETS}  # in microseconds
        try:
            route.tc("add", "netem", index, handle="1:", **delay)
        except Exception as error:
            raise OSError(f"no latency of {latency_ms:g} ms: the kernel has no netem ({error})") from error
    if shape is not None:
        route.link("set", index=index, gso_max_size=shape.segment)
        _tbf(route, "add", index, shape, latency=bool(latency_ms))


def _tbf(route: Any, command: str, index: int, shape: Shape, *, latency: bool) -> None:
    below = {"parent": "1:1"} if latency else {}
    rates = {"rate": shape.rate, "burst": shape.burst, "limit": shape.limit}
    route.tc(command, "tbf", index, handle=_TBF, **rates, **below)


def _reshape(route: Any, name: str, shape: Shape, state: bytes, *, latency: bool = False) -> None:
    """Hold what leaves an interface to its rate, or to none (``OPEN``).

    Its queue is empty before it holds it again, and the burst of an open one is not kept. Packets keep
    their size, which a connection has from when it was made.
    """
    index = route.link_lookup(ifname=name)[0]
    if state == SHAPED:
        _drain(route, index, name)
    opened = shape._replace(rate=_OPEN_RATE, burst=_OPEN_BURST)
    _tbf(route, "change", index, opened if state == OPEN else shape, latency=latency)


def _drain(route: Any, index: int, name: str) -> None:
    deadline = time.monotonic() + _DRAIN_SECONDS
    while waiting := sum(
        queue.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["backlog"]
        for queue in route.get_qdiscs(index)
    ):
        if time.monotonic() > deadline:
            raise OSError(f"{waiting} bytes still wait on {name} after {_DRAIN_SECONDS:g} s")
        time.sleep(1e-3)


def _configure_node(request: Request, node: int, holder: int) -> None:
    network, _, prefix = _NETWORK.partition("/")
    with _netlink(holder) as route:
        inner = route.link_lookup(ifname=LOOPBACK)[0]
        if request.inner is not None:  # packets as between nodes, which its queue does not cut
            route.link("set", index=inner, mtu=MTU)
            _shape(route, inner, request.inner)
        route.link("set", index=inner, state="up")
        index = route.link_lookup(ifname=interface(request.prefix, node))[0]
        route.addr("add", index=index, address=address(node), prefixlen=int(prefix))
        _shape(route, index, request.shapes[node], request.latency_ms)
        route.link("set", index=index, state="up")
        route.route(
            "replace",
            dst=f"{network}/{prefix}",
            oif=index,
            prefsrc=address(node),
            proto="kernel",
            scope="link",
            metrics={"cc_algo": CONGESTION},
        )


def _hold() -> int:
    """Fork a child that stands in a new network namespace and keeps it; returns its process."""
    keeper, (done, told) = os.getpid(), os.pipe()
    if not (holder := os.fork()):
        try:
            os.close(0)  # else the parent's end of our standard input would have two readers
            _check(_LIBC.unshare(CLONE_NEWNET), "unshare(NEWNET)")
            die_with_parent(keeper)
            os.write(told, b"ok")
            signal.pause()
        except OSError as error:
            os.write(told, str(error).encode())
        finally:
            os._exit(1)
    os.close(told)
    if (said := os.read(done, 4096)) != b"ok":
        raise OSError(said.decode() or "a node's holder died")
    os.close(done)
    return holder


def _join(request: Request, holders: Sequence[int]) -> None:
    """Make the interfaces: one veth pair for two nodes, else a bridge with one port per node."""
    names = [interface(request.prefix, node) for node in range(len(holders))]
    with _netlink(os.getpid()) as route:
        if len(holders) == 2:
            route.link(
                "add", ifname=names[0], kind="veth", peer={"ifname": names[1], "net_ns_pid": holders[1]}
            )
            route.link("set", index=route.link_lookup(ifname=names[0])[0], net_ns_pid=holders[0])
            return
        bridge = f"{request.prefix}br"
        route.link("add", ifname=bridge, kind="bridge")
        master = route.link_lookup(ifname=bridge)[0]
        route.link("set", index=master, state="up")
        for node, (name, holder) in enumerate(zip(names, holders, strict=True)):
            port = f"{request.prefix}p{node}"
            route.link("add", ifname=port, kind="veth", peer={"ifname": name, "net_ns_pid": holder})
            index = route.link_lookup(ifname=port)[0]
            route.link("set", index=index, master=master)
            # Towards the node; the node's own end shapes the other way.
            _shape(route, index, request.shapes[node])
            route.link("set", index=index, state="up")


def _set(request: Request, holders: Sequence[int], state: bytes) -> None:
    """Let all queues of the link hold it to its rate, or to none."""
    ends = [(node, holder, shape) for node, holder, shape in zip(count(), holders, request.shapes) if shape]
    if len(holders) > 2:
        with _netlink(os.getpid()) as route:
            for node, _, shape in ends:
                _reshape(route, f"{request.prefix}p{node}", shape, state)
    for node, holder, shape in ends:
        with _netlink(holder) as route:
            own = interface(request.prefix, node)
            _reshape(route, own, shape, state, latency=bool(request.latency_ms))
            if request.inner is not None:
                _reshape(route, LOOPBACK, request.inner, state)


def _ended_or(ready: socket.socket) -> bool:
    """Wait for a socket, or for the end of standard input; returns whether that has come."""
    return sys.stdin in select.select([sys.stdin, ready], [], [])[0]


def _serve(request: Request, holders: Sequence[int], listening: socket.socket) -> None:
    """Open the link for one process after the other that connects; an error in shaping it again ends all."""
    while not _ended_or(listening):
        with listening.accept()[0] as client:
            _set(request, holders, OPEN)
            with contextlib.suppress(OSError):  # a client that died is one that has finished
                client.sendall(OPEN)
            if _ended_or(client):
                return
            _set(request, holders, SHAPED)
            with contextlib.suppress(OSError):
                client.sendall(SHAPED)


def _keep(request: Request) -> None:
    """Make the namespaces and their link, answer, and keep them until standard input closes."""
    nodes = range(len(request.shapes))
    mode = _enter_own_namespace()
    holders = [_hold() for _ in nodes]
    _join(request, holders)
    for node, holder in enumerate(holders):
        _configure_node(request, node, holder)
    made = [(interface(request.prefix, node), address(node), holder) for node, holder in enumerate(holders)]
    if request.shapes[0] is None:
        answer({"mode": mode, "ports": made, "control": ""})
        sys.stdin.read()
        return
    with (
        tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(control := str(Path(folder, "link")))
        listening.listen()
        answer({"mode": mode, "ports": made, "control": control})
        _serve(request, holders, listening)


if __name__ == "__main__":
    with keeping():
        asked = json.loads(sys.argv[1])
        *shapes, inner = (shape and Shape(*shape) for shape in (*asked["shapes"], asked["inner"]))
        _keep(Request(asked["prefix"], shapes, asked["latency_ms"], inner))
