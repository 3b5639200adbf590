"""Functions that the ranks of tests run; they are module-level, since fresh processes import them."""

from __future__ import annotations

import errno
import os
import signal
import time

import torch
import torch.distributed as dist

from harness.cluster.link import exchange
from harness.cluster.rank import Progress, Rank, counters
from harness.errors import Refusal
from impl.comm import exchanges
from impl.comm.hang_monitor import HangMonitor
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from tests.support.never import Never


def place(rank: Rank, word: str) -> tuple[str, int, int, int, int]:
    """Return a rank's number, node and threads, and the sum of a collective over all ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)
    rank.report(Progress("placed", 1, 2))
    return word, rank.rank, rank.node, int(total), torch.get_num_threads()


def environment(rank: Rank, _: None) -> dict[str, str]:
    """Return environment variables as a rank sees them."""
    return dict(os.environ)


def crash(rank: Rank, how: str) -> None:
    """Let rank 1 fail in the given way while the others wait for it in a collective."""
    print(f"rank {rank.rank} was here")
    dist.barrier()
    if rank.rank == 1:
        if how == "raise":
            raise ZeroDivisionError("a planted error")
        if how == "refuse":
            raise Refusal("7 does not divide 4")
        if how == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        if how == "leave":
            os._exit(3)
        if how == "disk":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)  # its log is full, too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def fail_alike(rank: Rank, _: None) -> None:
    """Let every rank fail with the same error, rank 0 only after the others."""
    dist.barrier()
    time.sleep(0.2 * (rank.rank == 0))
    raise ZeroDivisionError("a planted error")


def hang(rank: Rank, _: None) -> None:
    """Let rank 1 never arrive at a barrier."""
    if rank.rank == 1:
        time.sleep(600)
    dist.barrier()


def exchanged_together(rank: Rank, message: tuple[int, int]) -> list[float]:
    """Exchange messages of all ranks at once, in grouped calls as with NCCL; returns the achieved rates."""
    return exchange(rank, *message, grouped=True, together=True)


def exchanged(rank: Rank, message: tuple[int, int]) -> tuple[list[float], int, int]:
    """Exchange messages; returns the achieved rates, and the bytes and packets that the interface sent meanwhile."""
    before = counters(rank.port.interface or "lo")
    rates = exchange(rank, *message, grouped=False)
    tx_bytes, packets = (counters(rank.port.interface or "lo") - before).tolist()
    return rates, tx_bytes, packets


def exchanged_inside(rank: Rank, nbytes: int) -> float:
    """Return the rate in Mbit/s at which the two ranks of a node send to each other at the same time."""
    other = rank.rank ^ 1
    outgoing = torch.ones(nbytes, dtype=torch.uint8)
    incoming = torch.zeros_like(outgoing)
    for _ in range(2):  # the first opens the connection
        receiving = dist.irecv(incoming, other)
        dist.barrier()
        begin = time.perf_counter()
        for work in (dist.isend(outgoing, other), receiving):
            work.wait()
        seconds = time.perf_counter() - begin
    return 2 * nbytes * 8 / seconds / 1e6


def _queue(rank: Rank) -> tuple[int, int]:
    """Return the rate of this rank's interface queue in bytes per second, and the bytes that wait in it."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        index = route.link_lookup(ifname=rank.port.interface)[0]
        (queue,) = (queue for queue in route.get_qdiscs(index) if queue.get_attr("TCA_KIND") == "tbf")
        rate = queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]
        return rate, queue.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["backlog"]


def opened(rank: Rank, nbytes: int) -> tuple[list[int], list[float], int]:
    """Open the link twice.

    Returns the rates of this node's queue before, during and after each opening; the rates that later messages
    achieved; and the bytes that waited in the queue when it was shaped again.
    """
    queues, waiting, rates = [], 0, list[float]()
    for _ in range(2):
        queues.append(_queue(rank)[0])
        dist.barrier()  # else the first rank opens the link while another reads its queue
        with rank.open_link():
            queues.append(_queue(rank)[0])
            exchange(rank, nbytes, 3, grouped=False)
        rate, backlog = _queue(rank)
        queues.append(rate)
        waiting += backlog
        rates += exchange(rank, nbytes, 1, grouped=False)
    return queues, rates, waiting


def fail_while_open(rank: Rank, how: str) -> None:
    """Let rank 0 or 1 fail while the link is open."""
    with rank.open_link():
        if rank.rank == (how == "raise"):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a planted error")
        dist.barrier()


def never_answer(rank: Rank, _: None) -> None:
    """Post a message that never arrives, as by an NCCL that hangs, and wait for it without a limit."""
    mesh = Mesh.create(rank.topology, torch.device("cpu"))
    wire = Wire(mesh)
    assert rank.fail is not None
    wire._monitor = HangMonitor(wire._watchdog, 0.5, rank.fail)
    exchanges.point_to_point = lambda *_: [Never()]
    exchange = wire.all_gather(mesh.topology.world_axis, 16, Tag("backward", "weights", "blocks.7"))
    exchange.post()
    time.sleep(1e6)
