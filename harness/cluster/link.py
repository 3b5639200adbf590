"""The link between the nodes of a trial, and its rate: shaped namespaces or interfaces, a pacer, or none.

``namespaces``: every node is a Linux network namespace and the kernel's ``tbf`` shapes both
directions (``harness.cluster.netns_shaper``), of peers too, which send outside our wire.  ``paced``: all
ranks share the host's loopback, and our wire books its bytes in a token bucket per node; that limits
nothing else, so peers are refused.  ``none``: unshaped loopback.  ``real``: a network that exists.
``shaped``: one whose hosts' own interfaces have that queue (``harness.cluster.nic_shaper``).
The rate that a link achieves is measured (:func:`exchange`), never assumed.

No torch, and no pydantic, at import.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from harness.cluster import netns_shaper
from harness.cluster.keeper import Keeper
from harness.cluster.nccl_environment import nccl_in_words
from harness.cluster.netns_shaper import shape
from harness.cluster.port import Port
from harness.cluster.rank import Rank, take_gpu
from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES

if TYPE_CHECKING:
    from harness.records.trial_record import LinkRecord
    from harness.suites.trial import Cluster

REPETITIONS: Final = 5  # of a calibration
PROBES: Final = 2  # of a probe after a trial
REACHED: Final = (0.9, 1.05)  # shares of its rate between which an interface is called shaped
PACED: Final = "The link is paced, so seconds are modelled, and peers cannot run at a rate: {}"
_ADVICE: Final = (
    "run as root with CAP_SYS_ADMIN, allow unprivileged user namespaces (user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns), or use link = 'paced'"
)


def message_bytes(cluster: Cluster) -> int:
    """Size of a calibration message: 0.2 s at the rate, at least 20 bursts, 50 latencies; 0 for one node.

    On a shaped link it is 0.5 s, at most 64 MiB: the end of 0.2 s is late by up to 0.6 % now and then.
    Without a rate it is 64 MiB; 8 MiB where only this machine's memory joins the nodes.
    """
    if cluster.nodes == 1:
        return 0
    if cluster.rate is None:
        return (8 if cluster.link == "none" else 64) * 2**20
    queue = shape(cluster.rate)
    longer = min(queue.rate // 2, 64 * 2**20) if cluster.link == "shaped" else 0
    return max(longer, queue.rate // 5, 20 * queue.burst, round(queue.rate * 0.05 * (cluster.latency or 0.0)))


def slowest_rates(by_rank: Iterable[Sequence[float]]) -> list[float]:
    """Rate of the slowest node in each repetition, Mbit/s; ranks that only waited have none."""
    return [min(rates) for rates in zip(*filter(None, by_rank), strict=True)]


@dataclass(slots=True)
class Link:
    """An open link between nodes; a context manager that closes it."""

    cluster: Cluster  # whose nodes it joins
    kind: str  # namespaces, paced, none, real or shaped
    why: str  # it is of that kind
    ports: tuple[Port, ...]  # one per node
    details: dict[str, Any] = field(default_factory=dict)  # burst, queue, MTU and the like, for the record
    close: Callable[[], object] = lambda: None
    calibrated_mbit: list[float] = field(default_factory=list)  # per repetition, filled in by the sweep

    paced_mbit: float | None = field(init=False)  # rate at which our wire paces itself, if it is ``paced``
    message_bytes: int = field(init=False)  # of a calibration; 0 for one node

    def __post_init__(self) -> None:
        self.paced_mbit = self.cluster.rate if self.kind == "paced" else None
        self.message_bytes = message_bytes(self.cluster)

    def record(self, probed_mbit: list[float]) -> LinkRecord:
        """The link in a trial's record; the requested rate is the slowest node's."""
        from harness.records.trial_record import LinkRecord

        rate = None if self.cluster.nodes == 1 else self.cluster.rate
        return LinkRecord(
            kind=self.kind,
            why=self.why,
            requested_mbit=None if rate is None else rate * self.cluster.slow,
            calibrated_mbit=self.calibrated_mbit,
            probed_mbit=probed_mbit,
            message_bytes=self.message_bytes,
            details=self.details,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Refuse a shaped link that does not achieve its rate in the calibration, or exceeds it."""
        rate = self.cluster.rate
        if self.kind != "shaped" or rate is None or not self.calibrated_mbit:
            return
        median = statistics.median(self.calibrated_mbit)
        if not REACHED[0] * rate <= median <= REACHED[1] * rate:
            why = "the network, or the hosts' congestion control (bbr does), carries no more"
            why = "messages go past the queue" if median > rate else why
            raise LinkError(f"link 'shaped' was asked for {rate:g} Mbit/s and carries {median:.4g}: {why}")


def open_link(cluster: Cluster, run_id: str) -> Link:
    """Open the link of a cluster; a LinkError if this machine cannot, or the cluster contradicts itself.

    Names of interfaces contain ``run_id``, at most 6 characters.  The caller fills in the ports of a ``real``
    or ``shaped`` link, and the hosts' supervisors shape it.
    """
    kind, rate, latency, why = cluster.link, cluster.rate, cluster.latency, "asked for"
    loopback = (Port("lo", "127.0.0.1"),) * cluster.nodes
    if cluster.nodes == 1:
        return Link(cluster, "none", "one node has no link", loopback)
    if kind == "shaped" and rate is not None:
        # The hosts' keepers do not lift the rate during a trial.
        return Link(cluster, kind, why, (), tbf_details(rate) | {"untimed": "shaped"})
    if kind in ("real", "none"):
        if rate is not None or latency:
            limit = f"{rate:g} Mbit/s" if rate is not None else f"a latency of {latency:g} ms"
            raise LinkError(f"link {kind!r} cannot have {limit}; use 'auto', 'namespaces' or 'paced'")
        return Link(cluster, kind, why, (Port(None, ""),) * cluster.nodes if kind == "real" else loopback)
    if kind in ("auto", "namespaces"):
        try:
            return _open_namespaces(cluster, run_id)
        except LinkError as error:
            if kind == "namespaces":
                raise
            why = f"auto: no namespaces ({error})"
    limits = {
        f"a node with {cluster.slow:g} of the rate needs": cluster.slow < 1,
        f"{cluster.inner_rate or 0:g} Mbit/s inside nodes need": cluster.inner_rate is not None,
        f"a latency of {latency or 0:g} ms without a rate needs": rate is None and latency,
    }
    for limit, requested in limits.items():
        if requested:
            raise LinkError(f"{limit} network namespaces ({why})")
    if rate is None:
        return Link(cluster, "none", why, loopback)
    details = {"header_bytes": 0, "latency_ms": latency or 0.0, "untimed": "open"}
    return Link(cluster, "paced", why, loopback, details)


def _open_namespaces(cluster: Cluster, run_id: str) -> Link:
    rate, latency, inner, nodes = cluster.rate, cluster.latency or 0.0, cluster.inner_rate, cluster.nodes
    rates = [rate] * (nodes - 1) + [None if rate is None else rate * cluster.slow]
    queue = {} if rate is None else tbf_details(rate) | {"untimed": "open"}
    try:
        keeper = Keeper(netns_shaper.__name__, json.dumps([f"zp{run_id}", rates, latency, inner]))
    except LinkError as error:
        advice = "" if "is not installed" in str(error) else f"; {_ADVICE}"
        raise LinkError(f"no network namespaces here: {error}{advice}") from None
    control = keeper.answer["control"]
    ports = tuple(Port(name, ip, holder, control=control) for name, ip, holder in keeper.answer["ports"])
    details = {
        "mode": keeper.answer["mode"],
        "joint": "veth" if nodes == 2 else "bridge",
        "mtu": netns_shaper.MTU,
        "congestion": netns_shaper.CONGESTION,
        "header_bytes": HEADER_BYTES,
        "latency_ms": latency,
        **({"nccl": nccl_in_words(ports[:1])} if cluster.transport == "nccl" else {}),
        **queue,
        **({"slow": cluster.slow} if cluster.slow < 1 else {}),
        **({} if inner is None else {"inner_mbit": inner}),
    }
    why = "asked for" if cluster.link == "namespaces" else "auto: namespaces work here"
    return Link(cluster, "namespaces", why, ports, details, keeper.end)


def tbf_details(rate_mbit: float) -> dict[str, Any]:
    """The queue for a rate, for the record."""
    queue = shape(rate_mbit)
    return {"queue": "tbf", "burst": queue.burst, "limit": queue.limit, "segment": queue.segment}


def measure_link(rank: Rank, message: tuple[int, int, str, str]) -> list[float]:
    """Rates (:func:`exchange`) by a message's bytes, its repetitions, the ranks' transport and launcher."""
    nbytes, repetitions, transport, launcher = message
    device = take_gpu(rank, launcher, transport) if transport == "nccl" else "cpu"
    grouped = transport not in ("shm", "gloo", "staged")  # messages that wait for each other are one call
    return exchange(rank, nbytes, repetitions, device, grouped=grouped)


def exchange(
    rank: Rank, message_bytes: int, repetitions: int, device: str = "cpu", *, grouped: bool
) -> list[float]:
    """Measure the link's rate by messages around the ring of nodes, between their first ranks: Mbit/s into
    this rank, one value per repetition; none for ranks that only wait.

    Every rank of the default group must call it. ``grouped`` sends and receives in one call, for NCCL, where
    a receive by itself, awaited by all ranks before any of them sends, never ends. All ranks then call a
    collective first, which makes the communicator; the barrier is gloo's.
    """
    import torch
    import torch.distributed as dist

    per_node, world = rank.topology.ranks_per_node, rank.topology.world
    before, after = (rank.rank - per_node) % world, (rank.rank + per_node) % world
    if rank.first_of_node:
        outgoing = torch.ones(message_bytes, dtype=torch.uint8, device=device)
        incoming = torch.zeros_like(outgoing)  # written: a first touch would be timed as link
    if grouped:
        dist.all_reduce(torch.zeros(1, device=device))
    achieved = []
    for repetition in range(-1, repetitions):  # the first, untimed, opens the connection
        if rank.first_of_node and not grouped:
            # Before the barrier and the data: gloo tells the sender over the same connection that it may
            # send. Behind this rank's own data that message would wait, which halves the rate.
            receiving = dist.irecv(incoming, before)
        dist.barrier()
        if rank.first_of_node:
            start = time.monotonic()
            if grouped:
                both = [dist.P2POp(dist.irecv, incoming, before), dist.P2POp(dist.isend, outgoing, after)]
                works = dist.batch_isend_irecv(both)
            else:
                works = [dist.isend(outgoing, after), receiving]  # type: ignore[list-item]  # None: outside
            booked = rank.pacer.book(message_bytes) if rank.pacer else start
            for work in works:
                work.wait()
            if device != "cpu":
                torch.cuda.synchronize()
            time.sleep(max(0.0, booked - time.monotonic()))
            if repetition >= 0:
                achieved.append(8e-6 * message_bytes / (time.monotonic() - start))
    dist.barrier()
    return achieved
