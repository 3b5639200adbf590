"""The link between the nodes of a trial: shaped namespaces or interfaces, an in-process pacer, or none.

``namespaces``: every node is a Linux network namespace and the kernel's ``tbf`` shapes both
directions (``harness.cluster.netns_shaper``), of peers too, which send outside our wire.  ``paced``: all
ranks share the host's loopback, and our wire books its bytes in a token bucket per node; that limits
nothing else, so peers are refused.  ``none``: unshaped loopback.  ``real``: a network that exists.
``shaped``: one whose hosts' own interfaces have that queue (``harness.cluster.nic_shaper``).
The rate that a link achieves is calibrated, never assumed.

No torch at import.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self

from harness.cluster import netns_shaper
from harness.cluster.keeper import ANSWER_SECONDS, Keeper
from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES

Kind = Literal["auto", "namespaces", "paced", "none", "real", "shaped"]

QUEUE_SECONDS: Final = 0.4  # shorter queues drop packets when several ranks send at once
REPETITIONS: Final = 5  # of a calibration
PROBES: Final = 2  # of a probe after a trial
REACHED: Final = (0.9, 1.05)  # shares of its rate between which an interface is called shaped
_ADVICE: Final = (
    "run as root with CAP_SYS_ADMIN, allow unprivileged user namespaces (user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns), or use link = 'paced'"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Request for a link, whose rate is per node and direction; None is unshaped.

    Its kind is one of the module's docstring; ``auto`` is namespaces where they work, else paced.  A message
    takes ``latency_ms`` milliseconds one way beyond its bytes at the rate.  It is calibrated with
    ``transport``: gloo, nccl, or a module that gives a backend.  ``hcas``: the InfiniBand adapters of NCCL,
    how many or which.  The last node has the share ``slow`` of the rate; ranks of a node send to each other
    at ``inner_mbit``, all together.
    """

    kind: Kind
    nodes: int
    rate_mbit: float | None
    latency_ms: float = 0.0
    transport: str = "gloo"
    hcas: int | tuple[str, ...] | None = None
    slow: float = 1.0
    inner_mbit: float | None = None

    @property
    def slowest_mbit(self) -> float | None:
        """The rate of the slowest node."""
        return None if self.rate_mbit is None else self.rate_mbit * self.slow


@dataclass(frozen=True, slots=True)
class Port:
    """A node's end of the link: network interface, its IPv4 address, and namespace of its ranks."""

    interface: str | None  # name for gloo and for the byte counters; None leaves the choice to gloo
    address: str
    # pid of a process inside the node's network namespace; None is the host's own namespace
    holder: int | None = None
    shaped: bool = False  # whether NCCL, too, has to send through the interface
    # InfiniBand adapters that NCCL may use, separated by commas; empty leaves the choice to it
    hcas: str = ""
    # the keeper's Unix-domain socket (`opened`), where it can hold the link to no rate
    control: str = ""


def shape(rate_mbit: float) -> netns_shaper.Shape:
    """Sizes of the ``tbf`` queue for a rate.

    The burst is worth about 4 ms of the rate (1 ms above 1 Gbit/s), so that messages of 50 ms
    and more run at the rate, not on saved tokens; packets are kept at half a burst, so that
    ``tbf`` does not cut them into MTU-sized ones, which costs 5 % in headers.
    """
    rate = max(1, round(rate_mbit * 1e6 / 8))
    segment = int(min(max(rate * 0.002, 2 * netns_shaper.MTU), 65536))
    burst = int(max(2 * (segment + HEADER_BYTES), rate * 0.001))
    return netns_shaper.Shape(
        rate=rate, burst=burst, limit=int(burst + rate * QUEUE_SECONDS), segment=segment
    )


def nccl_variables(port: Port) -> dict[str, str]:
    """What NCCL is told, so that it sends through a node's network namespace, shaped interface or adapters.

    Between namespaces of one machine it would else use peer access and shared memory, which no queue shapes:
    it tells hosts apart by their names (NCCL user guide, Environment Variables).  Between hosts it could use
    InfiniBand, a plugin's network or NVLink instead, and where named adapters do not work, sockets; with
    ``NCCL_NET`` it fails there.
    """
    if port.hcas:
        adapters = {"NCCL_IB_HCA": f"={port.hcas}", "NCCL_IB_DISABLE": "0"}
        return adapters | {"NCCL_NET": "IB", "NCCL_MNNVL_ENABLE": "0"}
    if port.interface is None or not (port.shaped or port.holder is not None):
        return {}
    sockets = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": f"={port.interface}"}
    if port.shaped:
        return sockets | {"NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
    return dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1") | sockets


def nccl_in_words(ports: Sequence[Port]) -> str:
    """What NCCL is told on every node, for the record; once where nodes do not differ."""
    told = [", ".join(f"{name}={value}" for name, value in nccl_variables(port).items()) for port in ports]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"node {node}: {words}" for node, words in enumerate(told))


def choose_hcas(asked: int | tuple[str, ...], there: Sequence[str], node: int) -> str:
    """The InfiniBand adapters that a node's NCCL may use, as :class:`Port` has them: the first of those
    ``there`` with an active port, or those named; a LinkError if there are not as many, or not those.
    """
    has = f"node {node} has {len(there)} with an active port ({', '.join(there) or 'none'})"
    if isinstance(asked, int):
        if asked > len(there):
            raise LinkError(f"cluster.hcas = {asked} InfiniBand adapters: {has}")
        return ",".join(there[:asked])
    if missing := [name for name in asked if name not in there]:
        raise LinkError(f"cluster.hcas names {', '.join(missing)}: {has}")
    return ",".join(asked)


def message_bytes(setting: Setting) -> int:
    """Size of a calibration message: 0.2 s at the rate, at least 20 bursts, 50 latencies.

    On a shaped link 0.5 s of up to 64 MiB: what comes last of 0.2 s is late by up to 0.6 % now and then.
    Unshaped 64 MiB; 8 MiB where nothing joins the nodes but this machine's memory.
    """
    if setting.rate_mbit is None:
        return (8 if setting.kind == "none" else 64) * 2**20
    form = shape(setting.rate_mbit)
    longer = min(form.rate // 2, 64 * 2**20) if setting.kind == "shaped" else 0
    return max(longer, form.rate // 5, 20 * form.burst, round(form.rate * 0.05 * setting.latency_ms))


def slowest(by_node: Sequence[Sequence[float]]) -> list[float]:
    """Rate of the slowest node in each repetition, Mbit/s."""
    return [min(rates) for rates in zip(*by_node, strict=True)] if by_node else []


@dataclass(slots=True)
class Link:
    """An open link between nodes; a context manager that closes it."""

    setting: Setting
    kind: str  # what was opened, for the reason ``why``: namespaces, paced, none, real or shaped
    why: str
    ports: tuple[Port, ...]  # one per node
    details: dict[str, Any] = field(default_factory=dict)  # burst, queue, MTU and the like, for the record
    close: Callable[[], object] = lambda: None
    calibrated_mbit: list[float] = field(default_factory=list)  # per repetition, filled in by the sweep

    paced_mbit: float | None = field(init=False)  # rate at which our wire paces itself, if it is ``paced``
    message_bytes: int = field(init=False)  # of a calibration; 0 of one node

    def __post_init__(self) -> None:
        self.paced_mbit = self.setting.rate_mbit if self.kind == "paced" else None
        self.message_bytes = message_bytes(self.setting) if self.setting.nodes > 1 else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, found: Sequence[float], *, after: bool = False) -> None:
        """Refuse a shaped link whose calibration, or probes ``after`` a trial, of ``found`` Mbit/s are wrong.

        Of probes only those that are faster: that they are slower is on record.
        """
        asked = self.setting.rate_mbit
        if self.kind != "shaped" or asked is None or not found:
            return
        middle = statistics.median(found)
        if middle > REACHED[1] * asked:
            why = "messages went past the queue, or it is gone"
        elif middle < REACHED[0] * asked and not after:
            why = "the network, or the hosts' congestion control (bbr does), carries no more"
        else:
            return
        when = " after the trial" if after else ""
        raise LinkError(f"link 'shaped' was asked for {asked:g} Mbit/s and carries {middle:.4g}{when}: {why}")


def open_link(setting: Setting, run_id: str) -> Link:
    """Open a link between nodes, whose interfaces have ``run_id`` (at most 6 characters) in their names; a
    LinkError if it is not possible on this machine, or contradicts itself.
    """
    kind, rate, latency, why = setting.kind, setting.rate_mbit, setting.latency_ms, "asked for"
    loopback = (Port("lo", "127.0.0.1"),) * setting.nodes
    if setting.nodes == 1 and kind != "real":
        return Link(setting, "none", "one node has no link", loopback)
    if kind in ("real", "none", "shaped"):  # what is shaped, a launcher's supervisors shape
        if rate is not None or latency:
            asked = f"{rate:g} Mbit/s" if rate is not None else f"a latency of {latency:g} ms"
            raise LinkError(f"link {kind!r} cannot have {asked}; use 'auto', 'namespaces' or 'paced'")
        ports = (Port(None, ""),) * setting.nodes if kind == "real" else loopback
        return Link(setting, kind, why, ports)
    if kind in ("auto", "namespaces"):
        try:
            return _open_namespaces(setting, run_id)
        except LinkError as error:
            if kind == "namespaces":
                raise
            why = f"auto: no namespaces ({error})"
    held = {
        f"a node with {setting.slow:g} of the rate needs": setting.slow < 1,
        f"{setting.inner_mbit or 0:g} Mbit/s inside nodes need": setting.inner_mbit is not None,
        f"a latency of {latency:g} ms without a rate needs": rate is None and latency,
    }
    for what, asked_for in held.items():
        if asked_for:
            raise LinkError(f"{what} network namespaces ({why})")
    if rate is None:
        return Link(setting, "none", why, loopback)
    details = {"header_bytes": 0, "latency_ms": latency, "untimed": "open"}
    return Link(setting, "paced", why, loopback, details)


def _open_namespaces(setting: Setting, run_id: str) -> Link:
    rate = setting.rate_mbit
    shapes = [None if rate is None else shape(rate)] * setting.nodes
    if rate is not None:
        shapes[-1] = shape(rate * setting.slow)
    inner = None if setting.inner_mbit is None else shape(setting.inner_mbit)
    request = netns_shaper.Request(f"zp{run_id}", shapes, setting.latency_ms, inner)
    try:
        keeper = Keeper(netns_shaper.__name__, json.dumps(asdict(request)))
    except LinkError as error:
        raise LinkError(f"no network namespaces here: {error}; {_ADVICE}") from None
    ports = tuple(
        Port(name, at, holder, control=keeper.answer["control"])
        for name, at, holder in keeper.answer["ports"]
    )
    details = {
        "mode": keeper.answer["mode"],
        "joint": "veth" if setting.nodes == 2 else "bridge",
        "mtu": netns_shaper.MTU,
        "congestion": netns_shaper.CONGESTION,
        "header_bytes": HEADER_BYTES,
        "latency_ms": setting.latency_ms,
    }
    if setting.transport == "nccl":
        details["nccl"] = nccl_in_words(ports[:1])
    if rate is not None:
        details |= tbf_details(rate) | {"untimed": "open"}
    if setting.slow < 1:
        details["slow"] = setting.slow
    if inner is not None:
        details["inner_mbit"] = setting.inner_mbit
    why = "asked for" if setting.kind == "namespaces" else "auto: namespaces work here"
    return Link(setting, "namespaces", why, ports, details, keeper.end)


def tbf_details(rate_mbit: float) -> dict[str, Any]:
    """The queue for a rate, for the record."""
    form = shape(rate_mbit)
    return {"queue": "tbf", "burst": form.burst, "limit": form.limit, "segment": form.segment}


def join(port: Port) -> None:
    """Move this process, which must be single-threaded, into a node's namespaces; else raise a LinkError."""
    if port.holder is None:
        return
    try:
        netns_shaper.enter(port.holder)
    except OSError as error:
        raise LinkError(f"cannot enter the namespaces of process {port.holder}: {error}") from error


@contextlib.contextmanager
def opened(control: str) -> Iterator[None]:
    """Hold a link to no rate in the body, by its keeper, which shapes it again also if this process dies; a
    LinkError if the keeper does not answer.
    """
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(ANSWER_SECONDS)
        _ask(keeper, lambda: keeper.connect(control), netns_shaper.OPEN)
        yield
        _ask(keeper, lambda: keeper.shutdown(socket.SHUT_WR), netns_shaper.SHAPED)


def _ask(keeper: socket.socket, question: Callable[[], None], expected: bytes) -> None:
    try:
        question()
        answer = keeper.recv(len(expected), socket.MSG_WAITALL)
    except OSError as error:
        raise LinkError(f"the keeper of the link does not answer: {error}") from error
    if answer != expected:
        raise LinkError(f"the keeper of the link ended: {expected.decode()!r} was expected, not {answer!r}")
