"""Context of one rank process, and the measurement of a link's rate.  No torch at import."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from harness.cluster.link import lift_rate
from harness.cluster.pacer import Pacer
from harness.cluster.port import Port
from harness.errors import Refusal
from impl.plan.topology import Topology


def counters(interface: str) -> NDArray[np.int64]:
    """Bytes and packets that an interface of this process's network namespace has sent."""
    count = psutil.net_io_counters(pernic=True, nowrap=False)[interface]
    return np.array([count.bytes_sent, count.packets_sent])


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a trial: steps done, and in all; ``text`` is a line for the parent process to print."""

    stage: str
    step: int = 0
    steps: int = 0
    text: str = ""


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a running process group."""

    rank: int  # its number; ``node * ranks_per_node + local``
    topology: Topology
    port: Port  # its node's end of the link
    pacer: Pacer | None  # its node's token bucket, where the link is paced
    report: Report  # sends progress to the parent process
    threads: int  # of torch

    @property
    def node(self) -> int:
        """Index of its node."""
        return self.topology.node_of(self.rank)

    @property
    def local(self) -> int:
        """Its index inside the node."""
        return self.rank % self.topology.ranks_per_node

    @property
    def first_of_node(self) -> bool:
        """Whether it is the first rank of its node, which measures for all of them."""
        return self.local == 0

    @contextlib.contextmanager
    def open_link(self) -> Iterator[None]:
        """Lift the rate between nodes in the body, but for hosts' interfaces; all ranks must call it."""
        if self.pacer is None and not self.port.control:
            yield
            return
        import torch.distributed as dist

        control = self.port.control if self.rank == 0 else ""
        with lift_rate(control) if control else contextlib.nullcontext():
            dist.barrier()
            if self.pacer is not None:
                self.pacer.open = True
            yield
            if self.pacer is not None:
                self.pacer.open = False
            dist.barrier()  # all messages have arrived
        dist.barrier()  # and no rank sends more before the link is held to its rate


def take_gpu(rank: Rank, launcher: str, transport: str) -> str:
    """Make a rank's GPU torch's current device, and return its name; a Refusal if the machine has too few."""
    import torch

    gpus, index = torch.cuda.device_count(), rank.rank if launcher == "local" else rank.local
    if transport == "staged":  # ranks share GPUs
        index %= gpus or 1
    if index >= gpus:
        raise Refusal(f"rank {rank.rank} needs GPU {index}, this machine has {gpus}")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


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
