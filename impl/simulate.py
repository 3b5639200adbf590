"""Runs many ranks as threads of this process, for experiments whose question is not about seconds.

A loss, a quantisation error or a ledger of 128 ranks needs no 128 processes::

    losses = simulate(nodes=16, ranks_per_node=8)(train)

``train(mesh)`` is what each rank runs.  It shards, trains and saves as in a process, and its losses, weights and
ledger are the same to the bit.  :mod:`impl.transport.threads` says how the ranks take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from impl.transport.threads import ThreadRank, ThreadRankError, ThreadWorld, current

T = TypeVar("T")
TIMEOUT_SECONDS: Final = 120.0


def simulate(
    nodes: int = 1,
    ranks_per_node: int = 1,
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
    timeout: float = TIMEOUT_SECONDS,
) -> Callable[..., list[Any]]:
    """Return a function that runs another function on every rank, as threads of this process.

    ``simulate(nodes=2, ranks_per_node=2)(body, *args)`` calls ``body(mesh, *args)`` once for each of the 4 ranks, and
    returns the results in rank order.  A mesh has the rank's number, ``mesh.rank``, and is passed to
    :func:`impl.zero.shard`.  Ranks take turns: one runs until it waits for a message.  Their seconds are therefore
    not those of ranks that run at once.

    Each rank has its own state of torch's random generators and begins with the caller's.  Python's ``random`` and
    NumPy's global generator, the default type of tensors, and everything else that belongs to the process, are
    shared.  There is no process group: ``torch.distributed`` cannot be called.

    Args:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        device: the device of all ranks: ``cpu``, or one GPU such as ``cuda`` or ``cuda:1``.
        threads: threads that torch may use for one operation.  With 1, results equal those of a rank that is a process
            with one thread; more can change the order of sums.
        timeout: seconds that a rank may run without waiting for a message.

    Raises:
        ThreadRankError: if the device is neither the CPU nor a GPU, if this is called by a rank, or if a rank runs for
            longer than ``timeout``.
        ValueError: if a number of nodes or ranks is not positive.
        BaseException: what the first rank that failed has raised, with a note that names the rank.  All other ranks
            are then ended, as after Ctrl-C.
    """
    topology, place = Topology(nodes, ranks_per_node), torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ThreadRankError(
            f"device={str(device)!r}: ranks of one process compute on the CPU or on one GPU; pass 'cpu' or 'cuda'"
        )
    if place.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the GPUs' random generators
        if str(place) == "cuda":
            place = torch.device("cuda", torch.cuda.current_device())

    def run(body: Callable[..., T], *args: Any) -> list[T]:
        if (outer := current()) is not None:
            raise ThreadRankError(
                f"simulate() is called by rank {outer.rank} of simulate(): call it outside of the ranks"
            )

        def rank_main(rank: ThreadRank) -> T:
            torch.set_num_threads(threads)  # each thread has its own number
            if place.type == "cuda":
                torch.cuda.set_device(place)
            # Backward passes run in the rank's own thread, whose turn it is, on a GPU too.
            with torch.autograd.set_multithreading_enabled(False):
                return body(Mesh(topology, rank.rank, place, thread=rank), *args)

        before = torch.get_num_threads()
        try:
            return ThreadWorld(topology.world, place, timeout).run(rank_main)
        finally:
            torch.set_num_threads(before)

    return run
