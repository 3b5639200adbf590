"""Runs many ranks as threads of this process, for experiments that do not measure time.

The loss, the quantisation errors and the traffic of 128 ranks can be found without 128 processes::

    losses = simulate(nodes=16, ranks_per_node=8)(train)

Each rank runs ``train(mesh)``, which shards, trains and saves as in a process of its own.  Losses, weights and counts
of bytes are the same to the bit as with processes.  :mod:`impl.transport.threads` says how the ranks take turns.
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
    returns the results in rank order.  ``mesh.rank`` is the rank's number, and :func:`impl.zero.shard` takes the mesh.
    Ranks take turns: a rank runs until it waits for a message, and then another rank runs.  Measured seconds therefore
    do not show how long the ranks would take if they ran at the same time.

    Each rank has its own state of torch's random generators, and begins with the state that the caller has.  All ranks
    share Python's ``random``, NumPy's global generator, the default type of tensors, and everything else that belongs
    to the process.  There is no process group: ``torch.distributed`` cannot be called.

    Args:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        device: the device of all ranks: ``cpu``, or one GPU such as ``cuda`` or ``cuda:1``.
        threads: threads that torch may use for one operation.  With 1 thread, each rank gets the same results as a
            process with 1 thread.  With more threads, sums may be added in another order.
        timeout: seconds for which a rank may compute between two waits for messages.  After that the rank counts as
            stuck.  The time that a rank waits for a message is not limited.

    Raises:
        ThreadRankError: if the device is neither the CPU nor a GPU.  The returned function raises a ThreadRankError
            if a rank of another :func:`simulate` calls it, or if one of its own ranks counts as stuck.
        ValueError: if a number of nodes or ranks is not positive.
        BaseException: the returned function raises the exception of the first rank that failed, with a note that
            names the rank.  All other ranks are then ended, as after Ctrl-C.
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
                f"simulate() was called inside simulate(), by its rank {outer.rank}: call it outside of the function "
                "that the ranks run"
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
