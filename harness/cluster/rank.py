"""Describes one rank to the code that runs on it: its number, its node's link, and how it reports progress.

This module also chooses the rank's GPU (:func:`take_gpu`).  It suspends the rate limit of the link between nodes while
untimed messages are sent (:func:`lift_rate`).  Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
from numpy.typing import NDArray

from harness.cluster.port import Port
from harness.errors import LinkError, Refusal
from harness.shaping import netns_shaper
from harness.shaping.keeper import ANSWER_SECONDS
from harness.shaping.pacer import Pacer
from impl.policy.topology import Topology

if TYPE_CHECKING:
    from impl.comm.mesh import Mesh


def counters(interface: str) -> NDArray[np.int64]:
    """Return the numbers of bytes and of packets that a network interface has sent so far: (2,) int64.

    ``interface`` is the interface's name in the network namespace of this process.
    """
    count = psutil.net_io_counters(pernic=True, nowrap=False)[interface]
    return np.array([count.bytes_sent, count.packets_sent])


@dataclass(frozen=True, slots=True)
class Progress:
    """Message about the progress of a trial, which rank 0 sends to the process that started the ranks."""

    stage: str  # what is being done, in words
    step: int = 0  # number of steps done
    steps: int = 0  # number of steps in all; 0 if the stage has none
    text: str = ""  # a line for the parent process to print


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a running trial: a process of a process group, or a thread."""

    rank: int  # number of the rank: node * ranks_per_node + local
    topology: Topology
    port: Port  # port of the rank's node
    pacer: Pacer | None  # the rate limiter of the rank's node; None unless the link is paced
    report: Report  # sends progress to the parent process
    threads: int  # number of torch's threads
    # Reports an error that was found outside of the main thread, and ends the rank.  If it is None, the wire prints
    # the error and ends the process.
    fail: Callable[[BaseException], object] | None = None
    # The rank's mesh if all ranks are threads of one process; None if each rank is a process.
    mesh: Mesh | None = None

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.topology.node_of(self.rank)

    @property
    def local(self) -> int:
        """Number of this rank among the ranks of its node, counted from 0."""
        return self.rank % self.topology.ranks_per_node

    @property
    def first_of_node(self) -> bool:
        """Whether this is the first rank of its node.

        The first rank takes the measurements of the whole node, such as the counters of the node's interface.
        """
        return self.local == 0

    @contextlib.contextmanager
    def open_link(self) -> Iterator[None]:
        """Suspend the rate limit of the link while the body of ``with`` runs, so that no message is slowed down.

        All ranks must call this method.  It does nothing if the link between nodes has no rate limit.  It also does
        nothing with ``link = "shaped"``, where the hosts limit their own interfaces.
        """
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
            dist.barrier()  # after this barrier, all messages of the body have arrived
        dist.barrier()  # no rank sends anything before this barrier, since the rate is being restored


def take_gpu(rank: Rank, launcher: str, transport: str) -> str:
    """Choose the GPU of a rank, make it torch's current device, and return its name, such as ``cuda:1``.

    With ``launcher`` = ``local``, the GPU has the rank's number, otherwise the rank's number inside its node.  With
    ``transport`` = ``staged``, several ranks may share a GPU.

    Raises:
        Refusal: If the machine has too few GPUs.
    """
    import torch

    gpus, index = torch.cuda.device_count(), rank.rank if launcher == "local" else rank.local
    if transport == "staged":  # ranks share GPUs
        index %= gpus or 1
    if index >= gpus:
        raise Refusal(
            f"rank {rank.rank} needs GPU {index} (counted from 0), but the number of GPUs of this machine is {gpus}: "
            "run fewer ranks on it, or let ranks share GPUs with cluster.transport = 'staged'"
        )
    torch.cuda.set_device(index)
    return f"cuda:{index}"


@contextlib.contextmanager
def lift_rate(control: str) -> Iterator[None]:
    """Suspend the rate limit of the link between nodes while the body of ``with`` runs.

    A process called the keeper limits the rate.  It listens at the Unix-domain socket ``control``.  On request, it
    suspends the limit.  After the body it restores the limit, even if this process dies in the body.
    """
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(ANSWER_SECONDS)
        _request(keeper, lambda: keeper.connect(control), netns_shaper.OPEN)
        yield
        _request(keeper, lambda: keeper.shutdown(socket.SHUT_WR), netns_shaper.SHAPED)


def _request(keeper: socket.socket, send: Callable[[], None], expected: bytes) -> None:
    """Call ``send()``, which sends a request to the process that limits the link's rate, and wait for the answer.

    ``keeper`` is the socket that is connected to that process.

    Raises:
        LinkError: If the process does not answer, or if the answer is not ``expected``.
    """
    try:
        send()
        answer = keeper.recv(len(expected), socket.MSG_WAITALL)
    except OSError as error:
        raise LinkError(
            f"the process that limits the link's rate does not answer: {error}; run the trial again"
        ) from error
    if answer != expected:
        raise LinkError(
            f"the process that limits the link's rate has ended: it answered {answer!r} instead of {expected!r}; run "
            "the trial again"
        )
