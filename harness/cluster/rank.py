"""One rank process: its place, its GPU, and its node's link, whose rate it can lift.  No torch at import."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from harness.cluster import netns_shaper
from harness.cluster.keeper import ANSWER_SECONDS
from harness.cluster.pacer import Pacer
from harness.cluster.port import Port
from harness.errors import LinkError, Refusal
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


@contextlib.contextmanager
def lift_rate(control: str) -> Iterator[None]:
    """Have a link's keeper hold it to no rate in the body; it is shaped again also if this process dies."""
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(ANSWER_SECONDS)
        _request(keeper, lambda: keeper.connect(control), netns_shaper.OPEN)
        yield
        _request(keeper, lambda: keeper.shutdown(socket.SHUT_WR), netns_shaper.SHAPED)


def _request(keeper: socket.socket, send: Callable[[], None], expected: bytes) -> None:
    try:
        send()
        answer = keeper.recv(len(expected), socket.MSG_WAITALL)
    except OSError as error:
        raise LinkError(f"the keeper of the link does not answer: {error}") from error
    if answer != expected:
        raise LinkError(f"the keeper of the link ended: {expected.decode()!r} was expected, not {answer!r}")
