"""Opens the link between the nodes of a trial, and measures its rate.

Kinds of link (``cluster.link``):

- ``namespaces``: every node is a Linux network namespace, and the kernel's ``tbf`` queue (token bucket filter) limits
  the rate in both directions (:mod:`harness.shaping.netns_shaper`).  The queue limits all messages, also those that
  DDP, FSDP2 or DeepSpeed send.
- ``paced``: all ranks share the host's loopback, and our engine delays its messages to keep to the rate
  (:mod:`harness.shaping.pacer`).  DDP, FSDP2 and DeepSpeed are refused, because nothing would limit their messages.
- ``none``: the host's loopback, without a limit.
- ``real``: an existing network between hosts, as fast as it is.
- ``shaped``: an existing network whose hosts limit their own interfaces with a ``tbf`` queue
  (:mod:`harness.shaping.nic_shaper`).
- ``auto``: ``namespaces`` if this machine allows them.  Otherwise ``paced`` if there is a rate, and ``none`` if not.

The rate that a link achieves is always measured (:func:`exchange`), never assumed.  Importing this module imports
neither torch nor pydantic.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from harness.cluster.nccl_environment import nccl_in_words
from harness.cluster.port import Port
from harness.cluster.rank import Rank, take_gpu
from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES
from harness.shaping import netns_shaper
from harness.shaping.keeper import Keeper
from harness.shaping.netns_shaper import shape

if TYPE_CHECKING:
    from harness.records.trial_record import LinkRecord
    from harness.suites.trial import Cluster

REPETITIONS: Final = 5  # number of messages in a calibration
PROBES: Final = 2  # number of messages in the probe after a trial
REACHED: Final = (0.9, 1.05)  # a shaped link must achieve between these two shares of its rate
OPENING: Final = 4  # the untimed message that opens a connection is this many times shorter than a timed one
PACED: Final = (
    "The link is paced: our engine delays its own messages to keep to the rate. Times are therefore modelled, and "
    "peers such as DDP cannot run with a rate. Reason: {}"
)
_ADVICE: Final = (
    "run as root with CAP_SYS_ADMIN, allow unprivileged user namespaces (user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns), or use link = 'paced'"
)


def message_bytes(cluster: Cluster) -> int:
    """Return the size in bytes of the messages with which the rate of a cluster's link is measured.

    - For a cluster of one node, the size is 0.
    - Without a rate, it is 8 MiB for link ``none``, and 64 MiB for all other links.
    - With a rate, it is the largest of these numbers:

      - the bytes that the link sends in 0.2 s;
      - the bytes that the link sends in 50 times the latency;
      - 20 bursts of the queue that limits the rate;
      - for a ``shaped`` link, the bytes that the link sends in 0.5 s, but at most 64 MiB.  On such a link, a message of
        0.2 s sometimes takes up to 0.6 % longer than its size and the rate say.

    With NCCL, all ranks of a node send at once (:func:`exchange`).  A size that was computed from a rate is then
    divided by the number of these ranks.
    """
    if cluster.nodes == 1:
        return 0
    if cluster.rate is None:
        return (8 if cluster.link == "none" else 64) * 2**20
    queue = shape(cluster.rate)
    longer = min(queue.rate // 2, 64 * 2**20) if cluster.link == "shaped" else 0
    whole = max(
        longer, queue.rate // 5, 20 * queue.burst, round(queue.rate * 0.05 * (cluster.latency or 0.0))
    )
    return -(-whole // (cluster.ranks_per_node if cluster.transport == "nccl" else 1))


def slowest_rates(by_rank: Sequence[Sequence[float]], per_node: int) -> list[float]:
    """Return, for each repetition of a measurement, the rate of the slowest node in Mbit/s.

    The ranks of a node send at the same time, and the node has finished when its slowest rank has finished.  The node's
    rate is therefore the slowest rank's rate times the number of ranks that sent.

    Args:
        by_rank: For each rank, its rate in Mbit/s in each repetition; an empty list for ranks that only waited.
        per_node: Number of ranks of a node.
    """
    nodes = [filter(None, by_rank[first : first + per_node]) for first in range(0, len(by_rank), per_node)]
    sums = [[len(rates) * min(rates) for rates in zip(*node, strict=True)] for node in nodes]
    return [min(rates) for rates in zip(*sums, strict=True)]


@dataclass(slots=True)
class Link:
    """An open link between nodes; a context manager that closes the link."""

    cluster: Cluster  # the cluster whose nodes the link joins
    kind: str  # namespaces, paced, none, real or shaped
    why: str  # the reason for this kind
    ports: tuple[Port, ...]  # one per node
    details: dict[str, Any] = field(default_factory=dict)  # burst, queue, MTU and the like, for records
    close: Callable[[], object] = lambda: None
    # The calibrated rates in Mbit/s, one for each repetition.  They are empty until the sweep sets them.
    calibrated_mbit: list[float] = field(default_factory=list)

    # The rate in Mbit/s to which our engine delays its messages; None unless the link is paced.
    paced_mbit: float | None = field(init=False)
    message_bytes: int = field(init=False)  # of a calibration message; 0 for one node

    def __post_init__(self) -> None:
        self.paced_mbit = self.cluster.rate if self.kind == "paced" else None
        self.message_bytes = message_bytes(self.cluster)

    def record(self, probed_mbit: list[float]) -> LinkRecord:
        """Return what a trial's record says about the link.

        If one node is slower than the others (``cluster.slow``), the record's requested rate is the rate that was
        requested for the slow node.  ``probed_mbit`` has the rates, in Mbit/s, that were measured after the trial.
        """
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
        """Raise a LinkError if the calibrated rate of a ``shaped`` link is far from the rate that was set.

        The median of the calibrated rates must lie between 0.9 and 1.05 of the set rate (:data:`REACHED`).  Links of
        other kinds are not checked.
        """
        rate = self.cluster.rate
        if self.kind != "shaped" or rate is None or not self.calibrated_mbit:
            return
        median = statistics.median(self.calibrated_mbit)
        if not REACHED[0] * rate <= median <= REACHED[1] * rate:
            why = "the network, or the hosts' congestion control (such as bbr), carries no more; set a lower rate"
            why = "messages bypass the queue; use link = 'real' without a rate" if median > rate else why
            raise LinkError(
                f"link 'shaped' was set to {rate:g} Mbit/s but carries {median:.4g} Mbit/s: {why}"
            )


def open_link(cluster: Cluster, run_id: str) -> Link:
    """Open the link between a cluster's nodes, and return it.

    For a ``real`` or ``shaped`` link, the network interfaces of the hosts (``ports``) are not known here, and the
    caller sets them.  The rate of a ``shaped`` link is limited later, by the supervisors, the processes that start the
    ranks on the hosts.

    Args:
        cluster: The nodes to connect, with the kind, rate and latency of the link (``cluster.link`` and so on).
        run_id: Part of the names of new interfaces, at most 6 characters.

    Raises:
        LinkError: If this machine cannot make the link, or the link cannot have the cluster's rate or latency.
    """
    kind, rate, latency, why = cluster.link, cluster.rate, cluster.latency, "asked for"
    loopback = (Port("lo", "127.0.0.1"),) * cluster.nodes
    if cluster.nodes == 1:
        return Link(cluster, "none", "one node has no link", loopback)
    if kind == "shaped" and rate is not None:
        # "untimed" says whether messages outside of the timed steps are limited too: here they are ("shaped").
        return Link(cluster, kind, why, (), tbf_details(rate) | {"untimed": "shaped"})
    if kind in ("real", "none"):
        if rate is not None or latency:
            limit = f"a rate of {rate:g} Mbit/s" if rate is not None else f"a latency of {latency:g} ms"
            kinds = "'auto', 'namespaces' or, with a rate, 'paced'"
            if cluster.launcher != "local":  # a launcher's nodes are no namespaces
                kinds = (
                    "'paced', with a rate" if latency else "'paced' or, for nodes on distinct hosts, 'shaped'"
                )
            raise LinkError(f"link {kind!r} cannot have {limit}; set cluster.link to {kinds}")
        return Link(cluster, kind, why, (Port(None, ""),) * cluster.nodes if kind == "real" else loopback)
    if kind in ("auto", "namespaces"):
        try:
            return _open_namespaces(cluster, run_id)
        except LinkError as error:
            if kind == "namespaces":
                raise
            why = f"auto: no namespaces ({error})"
    limits = {
        f"cluster.slow = {cluster.slow:g}": cluster.slow < 1,
        f"cluster.inner_rate = '{cluster.inner_rate or 0:g} Mbit/s'": cluster.inner_rate is not None,
        f"cluster.latency = '{latency or 0:g} ms' without cluster.rate": rate is None and latency,
    }
    for limit, requested in limits.items():
        if requested:
            raise LinkError(
                f"{limit} needs network namespaces, which this link lacks (link = {kind!r}, {why}); remove this setting"
            )
    if rate is None:
        return Link(cluster, "none", why, loopback)
    details = {"header_bytes": 0, "latency_ms": latency or 0.0, "untimed": "open"}
    return Link(cluster, "paced", why, loopback, details)


def _open_namespaces(cluster: Cluster, run_id: str) -> Link:
    """Make a network namespace for each node, and return the link between them.

    The keeper, a process of its own (:mod:`harness.shaping.keeper`), makes the namespaces and holds them until the link
    is closed.
    """
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
    """Return facts about the queue that limits a link to a rate, for the link's record.

    The queue is the kernel's token bucket filter (``tbf``).  Its parameters ``burst``, ``limit`` and ``segment`` are in
    bytes (:class:`harness.shaping.netns_shaper.Shape`).
    """
    queue = shape(rate_mbit)
    return {"queue": "tbf", "burst": queue.burst, "limit": queue.limit, "segment": queue.segment}


def measure_link(rank: Rank, message: tuple[int, int, str, str]) -> list[float]:
    """Measure the link's rate with :func:`exchange`, and return this rank's rate in each repetition, in Mbit/s.

    Supervisors run this function on their ranks, and can pass one argument besides the rank
    (:mod:`harness.cluster.node_supervisors`).  All settings are therefore in one tuple.

    Args:
        rank: This rank.
        message: (bytes of a message, number of repetitions, ``cluster.transport``, ``cluster.launcher``).
    """
    nbytes, repetitions, transport, launcher = message
    device = take_gpu(rank, launcher, transport) if transport == "nccl" else "cpu"
    grouped = transport not in ("shm", "gloo", "staged")  # NCCL and own backends send and receive in one call
    return exchange(rank, nbytes, repetitions, device, grouped=grouped, together=transport == "nccl")


def exchange(
    rank: Rank,
    message_bytes: int,
    repetitions: int,
    device: str = "cpu",
    *,
    grouped: bool,
    together: bool = False,
) -> list[float]:
    """Measure the link's rate: send messages from each node to the next node, with the last node sending to the first.

    Normally the first rank of each node sends a message to the first rank of the next node, and all other ranks wait.
    With ``together``, each rank sends a message to the rank with the same local number in the next node.  This is for
    GPUs, since a single GPU may reach only one of its node's network adapters.  Every rank of the default group must
    call this function.

    Args:
        rank: This rank.
        message_bytes: Size of a message.
        repetitions: Number of timed messages.  Before them, a shorter message opens the connections.
        device: torch's device on which messages lie.
        grouped: Whether to send and receive in one call.  NCCL needs this: if all ranks first waited for a receive,
            none of them would send.  If true, an all-reduce of all ranks makes NCCL's communicator before the first
            message.
        together: Whether all ranks of a node send messages at once.

    Returns:
        For each repetition, this rank's rate in Mbit/s: the bits of a message, divided by the time in which this rank
        sent one message and received one.  Empty for ranks that only wait.
    """
    import torch
    import torch.distributed as dist

    per_node, world = rank.topology.ranks_per_node, rank.topology.world
    before, after = (rank.rank - per_node) % world, (rank.rank + per_node) % world
    sends = together or rank.first_of_node
    if sends:
        outgoing = torch.ones(message_bytes, dtype=torch.uint8, device=device)
        # The buffer is written now, so that page faults are not timed as part of the link.
        incoming = torch.zeros_like(outgoing)
    if grouped:
        dist.all_reduce(torch.zeros(1, device=device))
    achieved = []
    for repetition in range(-1, repetitions):
        # The first message, which is not timed, opens the connection and its window; a shorter one is enough for that.
        size = message_bytes if repetition >= 0 else message_bytes // OPENING
        if sends and not grouped:
            # The receive is posted before the barrier, and so before this rank sends its own data.  When a receive is
            # posted, gloo sends a notice to the other rank that it may send.  After this rank's data, on the same
            # connection, the notice would have to wait for the data, which would halve the rate.
            receiving = dist.irecv(incoming[:size], before)
        dist.barrier()
        if sends:
            start = time.monotonic()
            if grouped:
                sent = dist.P2POp(dist.isend, outgoing[:size], after)
                both = [dist.P2POp(dist.irecv, incoming[:size], before), sent]
                works = dist.batch_isend_irecv(both)
            else:
                works = [dist.isend(outgoing[:size], after), receiving]  # type: ignore[list-item]  # never None here
            booked = rank.pacer.book(size) if rank.pacer else start
            for work in works:
                work.wait()
            if device != "cpu":
                torch.cuda.synchronize()
            time.sleep(max(0.0, booked - time.monotonic()))
            if repetition >= 0:
                achieved.append(8e-6 * message_bytes / (time.monotonic() - start))
    dist.barrier()
    return achieved
