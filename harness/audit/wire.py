"""Says how many bytes a rank sends for a call, inside its node and to other nodes.

The formulas are those of rings, which gloo and NCCL use for large messages: with P ranks, an all-gather or
reduce-scatter of a whole message of S bytes sends S (P - 1) / P to the next rank, an all-reduce twice as much.  An
all-to-all sends S / P to each other rank, a send its message.  For broadcast, reduce, gather and scatter the root is
not known, so that each rank is counted with its mean share, S (P - 1) / P; for gather and scatter, S is one rank's
piece.
Source: gloo/allgather_ring.h, gloo/allreduce.cc; NCCL's documentation of algorithm bandwidth (nccl-tests,
doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from harness.audit.calls import Calls, Count, Group, Key, Topology


class Sent(NamedTuple):
    """Bytes that a rank sends to ranks of its own node, and to other nodes."""

    inside: float
    between: float

    @property
    def all(self) -> float:
        """Bytes that the rank sends to all other ranks."""
        return self.inside + self.between


def sent(rank: int, key: Key, count: Count, group: Group, topology: Topology) -> Sent:
    """Return the bytes that ``rank`` sends for these calls in ``group``."""
    size, me = group.size, topology.nodes.get(rank, 0)
    if key.done_as == "recv" or size < 2:
        return Sent(0, 0)
    if key.done_as == "send":
        away = key.peer >= 0 and topology.nodes.get(key.peer, 0) != me
        return Sent(0, count.bytes) if away else Sent(count.bytes, 0)
    if key.done_as == "all_to_all":
        away_ranks = sum(topology.nodes.get(other, 0) != me for other in group.ranks)
        return Sent(count.bytes * (size - 1 - away_ranks) / size, count.bytes * away_ranks / size)
    times = 2 if key.done_as == "all_reduce" else 1
    nbytes = times * count.bytes * (size - 1) / size
    following = group.ranks[(group.ranks.index(rank) + 1) % size] if rank in group.ranks else rank
    return Sent(0, nbytes) if topology.nodes.get(following, 0) != me else Sent(nbytes, 0)


def between_by_node(calls: Calls, step: int, *, late: bool = False) -> dict[int, float]:
    """Return the bytes that leave each node in a step; with ``late``, only after the step's counters were read."""
    leaving: dict[int, float] = defaultdict(float)
    for rank in calls.ranks:
        leaving[calls.topology.nodes[rank.number]] += 0
        for key, count in (rank.late if late else rank.rows).get(step, {}).items():
            group = calls.group(rank, key.group)
            leaving[calls.topology.nodes[rank.number]] += sent(
                rank.number, key, count, group, calls.topology
            ).between
    return dict(leaving)
