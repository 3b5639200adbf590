"""Process that makes the nodes' network namespaces and keeps them alive (the keeper).

Every node is an *anonymous* network namespace, held by a small child of this process; nothing is
named under ``/run/netns`` and nothing is made in the namespace of the host.  Two nodes are joined
by one veth pair, more by a bridge in the keeper's own namespace.  When the keeper goes, its
children go (``PR_SET_PDEATHSIG``), and with the last process inside, the kernel removes
namespaces and interfaces; the keeper goes when its standard input closes, so also after
``kill -9`` of the parent.

As root it makes the namespaces directly; otherwise inside a user namespace of its own.  Run as
``python -m harness.cluster.netns_shaper REQUEST``, a :class:`Request` as JSON, it answers with one JSON
line.  No torch: a fresh interpreter starts in a tenth of a second.

While a process is connected to its Unix-domain socket, the link is held to no rate: messages that are not
timed need not wait for it.  When that process closes its side, or dies, the link is shaped again, and the
keeper says so.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1

LOOPBACK: Final = "lo"
MTU: Final = 1500  # bytes
_NAME_LENGTH: Final = 15  # of a Linux interface
NETWORK: Final = "10.77.0.0"
PREFIX: Final = 16  # of NETWORK: 65,533 nodes
# The host's default may be BBR, whose model of the path breaks when both directions are full: a
# 1.25 MB message each way at 50 Mbit/s ran at 26 to 49 Mbit/s under BBR and at 47.6 to 48.5 under Reno,
# which every kernel has.  Set on the route, since /proc/sys may be read-only.
CONGESTION: Final = "reno"
_DELAYED_PACKETS: Final = 100_000  # that netem holds at once; its own default drops above 1000
_TBF: Final = "10:"  # handle of the queue that holds an interface to its rate
_OPEN_RATE: Final = 4_000_000_000  # bytes per second: near the most that tbf can say, more than any CPU sends
_OPEN_BURST: Final = 4_000_000  # bytes
_DRAIN_SECONDS: Final = 5.0
OPEN: Final = b"open"
SHAPED: Final = b"shaped"


class KeeperError(Exception):
    """Namespaces cannot be made on this machine; the message says which call failed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a ``tbf`` queue."""

    rate: int  # bytes per second
    burst: int  # bytes that may leave at once after a pause
    limit: int  # bytes that wait before packets are dropped
    # largest packet handed to the queue (the interface's ``gso_max_size``).  A packet above the burst would
    # be cut into MTU-sized ones, each with its own headers
    segment: int


@dataclass(frozen=True, slots=True)
class Request:
    """Request to the keeper: ``nodes`` namespaces whose interface names start with ``prefix``.

    Packets leave a node ``latency_ms`` milliseconds late.  ``slow`` is the last node's shape, if it differs,
    ``inner`` that of a node's loopback, through which its ranks reach each other.
    """

    nodes: int
    prefix: str
    shape: Shape | None
    latency_ms: float = 0.0
    slow: Shape | None = None
    inner: Shape | None = None

    def shape_of(self, node: int) -> Shape | None:
        """How the link of a node is shaped, both ways."""
        return self.slow if self.slow is not None and node == self.nodes - 1 else self.shape


def address(node: int) -> str:
    """The IPv4 address of a node."""
    return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"


def interface(prefix: str, node: int) -> str:
    """The name of a node's interface."""
    return f"{prefix}n{node}"


_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def enter(process: int) -> None:
    """Move this process, which must be single-threaded, into the namespaces of ``process``.

    Raises:
        OSError: if the kernel refuses.
    """
    names = {"user": CLONE_NEWUSER, "net": CLONE_NEWNET}
    if Path(f"/proc/{process}/ns/user").samefile("/proc/self/ns/user"):
        del names["user"]
    opened: dict[str, int] = {}
    try:
        for name in names:  # all before the first move: afterwards /proc is seen with other rights
            opened[name] = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)
        for name, descriptor in opened.items():
            # os.setns is there from Python 3.12 only
            _check(_LIBC.setns(descriptor, names[name]), f"setns({name})")
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


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


def _netlink() -> Any:
    # Inside the namespace only: a socket belongs to the namespace in which it was opened.
    from pyroute2 import IPRoute

    return IPRoute()


def _shape(route: Any, index: int, shape: Shape | None, latency_ms: float = 0.0) -> None:
    """Queue what leaves an interface: ``netem`` delays it, ``tbf`` below holds it to the rate."""
    below: dict[str, Any] = {}
    if latency_ms:
        delay = {"delay": round(latency_ms * 1e3), "limit": _DELAYED_PACKETS}  # in microseconds
        try:
            route.tc("add", "netem", index, handle="1:", **delay)
        except Exception as error:
            raise KeeperError(
                f"no latency of {latency_ms:g} ms: the kernel has no netem ({error})"
            ) from error
        below = {"parent": "1:1"}
    if shape is None:
        return
    route.link("set", index=index, gso_max_size=shape.segment)
    route.tc("add", "tbf", index, handle=_TBF, rate=shape.rate, burst=shape.burst, limit=shape.limit, **below)


def _reshape(shapes: Mapping[str, Shape], *, latency: bool, state: bytes) -> None:
    """Hold what leaves the interfaces of this namespace, by name, to their rates, or to none (``OPEN``).

    Their queues are empty before they hold it again, and the burst of an open one is not kept. Packets keep
    their size, which a connection has from when it was made.
    """
    with _netlink() as route:
        for name, shape in shapes.items():
            rate, burst = (_OPEN_RATE, _OPEN_BURST) if state == OPEN else (shape.rate, shape.burst)
            index = route.link_lookup(ifname=name)[0]
            if state == SHAPED:
                _drain(route, index, name)
            parent = {"parent": "1:1"} if latency else {}
            route.tc("change", "tbf", index, handle=_TBF, rate=rate, burst=burst, limit=shape.limit, **parent)


def _drain(route: Any, index: int, name: str) -> None:
    deadline = time.monotonic() + _DRAIN_SECONDS
    while waiting := sum(
        queue.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["backlog"]
        for queue in route.get_qdiscs(index)
    ):
        if time.monotonic() > deadline:
            raise KeeperError(f"{waiting} bytes still wait on {name} after {_DRAIN_SECONDS:g} s")
        time.sleep(1e-3)


def _configure_node(request: Request, node: int) -> None:
    with _netlink() as route:
        inner = route.link_lookup(ifname=LOOPBACK)[0]
        if request.inner is not None:  # packets as between nodes, which its queue does not cut
            route.link("set", index=inner, mtu=MTU)
            _shape(route, inner, request.inner)
        route.link("set", index=inner, state="up")
        index = route.link_lookup(ifname=interface(request.prefix, node))[0]
        route.addr("add", index=index, address=address(node), prefixlen=PREFIX)
        _shape(route, index, request.shape_of(node), request.latency_ms)
        route.link("set", index=index, state="up")
        route.route(
            "replace",
            dst=f"{NETWORK}/{PREFIX}",
            oif=index,
            prefsrc=address(node),
            proto="kernel",
            scope="link",
            metrics={"cc_algo": CONGESTION},
        )


@dataclass(slots=True)
class _Holder:
    """A child process inside a node's namespace, and the pipes to and from it."""

    pid: int
    go: int
    answers: int

    def wait(self) -> None:
        """Wait for its next answer; what it reports else is a KeeperError."""
        answer = os.read(self.answers, 4096).decode()
        if answer != "ok":
            raise KeeperError(answer or "a node's holder died")


def _hold(request: Request, node: int) -> _Holder:
    """Fork the holder of one node."""
    keeper = os.getpid()
    go_read, go_write = os.pipe()
    answers_read, answers_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(go_read)
        os.close(answers_write)
        return _Holder(pid, go_write, answers_read)
    os.close(0)  # else the parent's end of our standard input would have two readers
    try:
        _check(_LIBC.unshare(CLONE_NEWNET), "unshare(NEWNET)")
        die_with_parent(keeper)
        os.write(answers_write, b"ok")
        os.read(go_read, 1)
        _configure_node(request, node)
        os.write(answers_write, b"ok")
        while state := os.read(go_read, len(SHAPED)):
            shape = request.shape_of(node)
            assert shape is not None  # noqa: S101  # nobody asks for another state else
            _reshape({interface(request.prefix, node): shape}, latency=bool(request.latency_ms), state=state)
            if request.inner is not None:
                _reshape({LOOPBACK: request.inner}, latency=False, state=state)
            os.write(answers_write, b"ok")
    except BaseException as error:  # the process boundary
        os.write(answers_write, f"node {node}: {error}"[:4000].encode())
    finally:
        os._exit(1)


def _join(request: Request, holders: list[_Holder]) -> None:
    """Make the interfaces: one veth pair for two nodes, else a bridge with one port per node."""
    names = [interface(request.prefix, node) for node in range(request.nodes)]
    with _netlink() as route:
        if request.nodes == 2:
            peer = {"ifname": names[1], "net_ns_pid": holders[1].pid}
            route.link("add", ifname=names[0], kind="veth", peer=peer)
            route.link("set", index=route.link_lookup(ifname=names[0])[0], net_ns_pid=holders[0].pid)
            return
        bridge = f"{request.prefix}br"
        route.link("add", ifname=bridge, kind="bridge")
        master = route.link_lookup(ifname=bridge)[0]
        route.link("set", index=master, state="up")
        for node, (name, holder) in enumerate(zip(names, holders, strict=True)):
            port = f"{request.prefix}p{node}"
            route.link("add", ifname=port, kind="veth", peer={"ifname": name, "net_ns_pid": holder.pid})
            index = route.link_lookup(ifname=port)[0]
            route.link("set", index=index, master=master)
            # Towards the node; the node's own end shapes the other way.
            _shape(route, index, request.shape_of(node))
            route.link("set", index=index, state="up")


def _ports(request: Request) -> dict[str, Shape]:
    """Shapes of the bridge's ports in the keeper's namespace; none where two nodes are joined directly."""
    shapes = [request.shape_of(node) for node in range(0 if request.nodes == 2 else request.nodes)]
    return {f"{request.prefix}p{node}": shape for node, shape in enumerate(shapes) if shape is not None}


def _set(request: Request, holders: list[_Holder], state: bytes) -> None:
    """Let all queues of the link hold it to its rate, or to none."""
    _reshape(_ports(request), latency=False, state=state)
    for holder in holders:
        os.write(holder.go, state)
    for holder in holders:
        holder.wait()


def _ended_or(ready: socket.socket) -> bool:
    """Wait for a socket, or for the end of standard input; returns whether that has come."""
    return sys.stdin in select.select([sys.stdin, ready], [], [])[0]


def _serve(request: Request, holders: list[_Holder], listening: socket.socket) -> None:
    """Open the link for one process after the other that connects, until standard input closes.

    If it could not be shaped again nobody may use it: the error ends this process.
    """
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


def keep(request: Request) -> tuple[str, list[_Holder]]:
    """Make the namespaces and their link; returns the mode and a holder inside each node.

    Raises:
        KeeperError, OSError: with the call that failed.
    """
    if len(longest := interface(request.prefix, request.nodes - 1)) > _NAME_LENGTH:
        raise KeeperError(f"{longest!r} is longer than an interface's name")
    mode = _enter_own_namespace()
    # Fork before the first netlink socket is open, so that the children share none.
    holders = [_hold(request, node) for node in range(request.nodes)]
    for holder in holders:
        holder.wait()
    _join(request, holders)
    for holder in holders:  # one after the other: with a node that fails goes the other end of its neighbour
        os.write(holder.go, b"g")
        holder.wait()
    return mode, holders


def main() -> None:
    """Answer the request and stay until standard input closes; with ``enter PID`` only try to enter."""
    if sys.argv[1] == "enter":
        enter(int(sys.argv[2]))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a Ctrl-C ends the link
    asked = json.loads(sys.argv[1])
    shapes = {name: Shape(**asked[name]) if asked.get(name) else None for name in ("shape", "slow", "inner")}
    shape, request = shapes["shape"], Request(**asked | shapes)
    try:
        mode, holders = keep(request)
    except Exception as error:  # reported to the parent, whatever netlink raised
        print(json.dumps({"error": str(error)}), flush=True)
        return
    ports = [
        (interface(request.prefix, node), address(node), holder.pid) for node, holder in enumerate(holders)
    ]
    answer: dict[str, Any] = {"mode": mode, "ports": ports, "control": ""}
    with (
        tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        if shape is not None:
            answer["control"] = str(Path(folder, "link"))
            listening.bind(answer["control"])
            listening.listen()
        print(json.dumps(answer), flush=True)
        if shape is None:
            sys.stdin.read()
        else:
            _serve(request, holders, listening)


if __name__ == "__main__":
    main()
