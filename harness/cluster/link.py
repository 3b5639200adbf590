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
import os
import select
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from harness.cluster import netns_shaper
from harness.records.packet_sizes import HEADER_BYTES

Kind = Literal["auto", "namespaces", "paced", "none", "real", "shaped"]

QUEUE_SECONDS: Final = 0.4  # shorter queues drop packets when several ranks send at once
REPETITIONS: Final = 5  # of a calibration
PROBES: Final = 2  # of a probe after a trial
REACHED: Final = (0.9, 1.05)  # shares of its rate between which an interface is called shaped
_KEEPER: Final = "harness.cluster.netns_shaper"
_ROOT: Final = Path(__file__).resolve().parents[2]  # where harness is importable from
_ANSWER_SECONDS: Final = 120.0  # a keeper imports its libraries first; one that dies is noticed at once


class LinkError(Exception):
    """A link cannot be opened as asked; the message says why and what to do."""


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
    # Mbit/s per repetition, filled in by the sweep
    calibrated_mbit: list[float] = field(default_factory=list)
    _keeper: subprocess.Popen[str] | None = None
    release: Callable[[], None] | None = None  # lets go of the interfaces of a shaped link
    requested_mbit: float | None = field(init=False)  # of the slowest node; None is unshaped
    # Mbit/s at which our wire paces itself, if the link is ``paced``
    paced_mbit: float | None = field(init=False)
    message_bytes: int = field(init=False)  # of a calibration; 0 of one node

    def __post_init__(self) -> None:
        self.requested_mbit = self.setting.slowest_mbit
        self.paced_mbit = self.setting.rate_mbit if self.kind == "paced" else None
        self.message_bytes = message_bytes(self.setting) if self.setting.nodes > 1 else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note_calibration(self, by_rank: Sequence[Sequence[float]]) -> None:
        """Keep the rates that nodes' first ranks measured before any trial, and check them."""
        self.calibrated_mbit = slowest([rates for rates in by_rank if rates])
        self.check(self.calibrated_mbit)

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

    def close(self) -> None:
        """Close the link; the kernel removes the namespaces with their last process."""
        if self._keeper is not None:
            end_keeper(self._keeper)
            self._keeper = None
        if self.release is not None:
            self.release()
            self.release = None


def open_link(setting: Setting, run_id: str) -> Link:
    """Open a link between nodes, whose interfaces have ``run_id`` (at most 6 characters) in their names; a
    LinkError if it is not possible on this machine, or contradicts itself.
    """
    rate, why = setting.rate_mbit, "asked for"
    if setting.latency_ms and (setting.kind in ("real", "none", "shaped") or setting.nodes == 1):
        raise LinkError(
            f"a latency of {setting.latency_ms:g} ms cannot be added to link {setting.kind!r} between "
            f"{setting.nodes} node(s); use 'auto', 'namespaces' or 'paced'"
        )
    if setting.kind == "real":
        if rate is not None:
            raise LinkError(
                f"link 'real' is a network that exists and cannot be shaped to {rate:g} Mbit/s; "
                "say rate = 'unshaped', or link = 'shaped' or 'paced'"
            )
        return Link(setting, "real", why, (Port(None, ""),) * setting.nodes)
    loopback = (Port("lo", "127.0.0.1"),) * setting.nodes
    if setting.nodes == 1:
        return Link(setting, "none", "one node has no link", loopback)
    if setting.kind == "shaped":
        raise LinkError("link 'shaped' joins hosts, whose supervisors a launcher starts; use 'namespaces'")
    if setting.kind == "none" and rate is not None:
        raise LinkError(
            f"link 'none' cannot hold a rate of {rate:g} Mbit/s; "
            "use 'auto', 'namespaces' or 'paced', or rate = 'unshaped'"
        )
    if setting.kind == "namespaces":
        return _open_namespaces(setting, run_id, why)
    if setting.kind == "auto":
        try:
            return _open_namespaces(setting, run_id, "auto: namespaces work here")
        except LinkError as error:
            why = f"auto: no namespaces ({error})"
    if setting.slow < 1:
        raise LinkError(f"a node with {setting.slow:g} of the rate needs network namespaces ({why})")
    if setting.inner_mbit is not None:
        raise LinkError(f"{setting.inner_mbit:g} Mbit/s inside nodes need network namespaces ({why})")
    if rate is None and setting.latency_ms:
        raise LinkError(
            f"a latency of {setting.latency_ms:g} ms without a rate needs network namespaces ({why})"
        )
    if rate is None:
        return Link(setting, "none", why, loopback)
    details = {"header_bytes": 0, "latency_ms": setting.latency_ms, "untimed": "open"}
    return Link(setting, "paced", why, loopback, details)


def _open_namespaces(setting: Setting, run_id: str, why: str) -> Link:
    if not sys.platform.startswith("linux"):
        raise LinkError(f"network namespaces exist on Linux only, this is {sys.platform}; use link = 'paced'")
    form = None if setting.rate_mbit is None else shape(setting.rate_mbit)
    slow = None if setting.slow == 1 or setting.slowest_mbit is None else shape(setting.slowest_mbit)
    inner = None if setting.inner_mbit is None else shape(setting.inner_mbit)
    request = netns_shaper.Request(setting.nodes, f"zp{run_id}", form, setting.latency_ms, slow, inner)
    process = start_keeper(_KEEPER, json.dumps(asdict(request)))
    try:
        answer = answer_of(process, "no network namespaces here", f"; {_advice()}")
        control = answer["control"]
        ports = tuple(Port(name, at, holder, control=control) for name, at, holder in answer["ports"])
        _try_to_join(ports[0])
    except BaseException:
        end_keeper(process)
        raise
    details = {
        "mode": answer["mode"],
        "joint": "veth" if setting.nodes == 2 else "bridge",
        "mtu": netns_shaper.MTU,
        "congestion": netns_shaper.CONGESTION,
        "header_bytes": HEADER_BYTES,
        "latency_ms": setting.latency_ms,
    }
    if setting.transport == "nccl":
        details["nccl"] = nccl_in_words(ports[:1])
    if form is not None:
        details |= {"queue": "tbf", "burst": form.burst, "limit": form.limit, "segment": form.segment}
        details["untimed"] = "open"
    if slow is not None:
        details["slow"] = setting.slow
    if inner is not None:
        details["inner_mbit"] = setting.inner_mbit
    return Link(setting, "namespaces", why, ports, details, _keeper=process)


def start_keeper(module: str, request: str) -> subprocess.Popen[str]:
    """Start a process that holds something of the kernel's until its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-m", module, request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        start_new_session=True,  # a Ctrl-C in the terminal is for the sweep alone
    )


def answer_of(process: subprocess.Popen[str], refused: str, advice: str = "") -> dict[str, Any]:
    """Read the one-line answer of a keeper; its reason, if it has one, is a LinkError between these words."""
    assert process.stdout is not None  # noqa: S101 - piped above
    if not select.select([process.stdout], [], [], _ANSWER_SECONDS)[0]:
        raise LinkError(f"the keeper of the link did not answer within {_ANSWER_SECONDS:g} s")
    if not (line := process.stdout.readline()):
        process.kill()
        tail = process.communicate()[1].strip().splitlines()[-1:]
        raise LinkError(f"the keeper of the link died: {' '.join(tail) or 'no message'}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise LinkError(f"{refused}: {answer['error']}{advice}")
    return answer


def _advice() -> str:
    found = []
    for switch in ("user/max_user_namespaces", "kernel/apparmor_restrict_unprivileged_userns"):
        with contextlib.suppress(OSError):
            found.append(f"{switch.replace('/', '.')}={Path('/proc/sys', switch).read_text().strip()}")
    where = "root" if os.geteuid() == 0 else "an ordinary user"
    return (
        f"tried as {where} ({', '.join(found)}): run as root with CAP_SYS_ADMIN, allow unprivileged user "
        "namespaces, or use link = 'paced'"
    )


def _try_to_join(port: Port) -> None:
    """Check in a child process that other processes may enter a node's namespace; else raise a LinkError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _KEEPER, "enter", str(port.holder)],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise LinkError(f"no process entered a node's namespace within {_ANSWER_SECONDS:g} s") from None
    if done.returncode != 0:
        raise LinkError(
            f"cannot enter a node's namespace: {done.stderr.strip().splitlines()[-1]}; {_advice()}"
        )


def end_keeper(process: subprocess.Popen[str], seconds: float = 2.0) -> str:
    """Let a keeper end, which takes away what it holds, or kill it after a while; returns its last words."""
    try:
        return process.communicate(timeout=seconds)[1]  # it ends when its standard input closes
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1]


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
    """Hold a link to no rate in the body, by its keeper, which shapes it again also if this process dies.

    Raises:
        LinkError: if the keeper does not answer.
    """
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(_ANSWER_SECONDS)
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
