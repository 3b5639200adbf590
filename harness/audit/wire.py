"""Computes how many bytes a rank sends for a call, inside its node and to other nodes.

The formulas assume ring algorithms, which gloo and NCCL use for large messages.  With P ranks and a whole message of S
bytes (the complete tensor, such as the gathered tensor of an all-gather), a rank sends

| operation | bytes |
| --- | --- |
| all-gather, reduce-scatter | S (P - 1) / P to the next rank of the group |
| all-reduce | 2 S (P - 1) / P to the next rank of the group |
| all-to-all | S / P to each other rank |
| send | S to the receiving rank |
| broadcast, reduce, gather, scatter | S (P - 1) / P to the next rank of the group |

The last row is the mean over all ranks, since the audit does not know which rank is the root.  For gather and scatter,
S is the size of one rank's tensor.

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
    """Return the bytes that a rank sends, inside its node and to other nodes, for calls that agree in their ``key``.

    Args:
        rank: The global rank.
        key: The fields that the calls share, such as their operation.
        count: Number of the calls, and the sums of their elements and bytes.  The bytes of a collective are those of
            the whole message, such as the gathered tensor of an all-gather, and not those of one rank's part.
        group: The process group of the calls.
        topology: The node of each rank.
    """
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
    """Return, for each node, the bytes that the node's ranks send to other nodes in a step.

    With ``late``, a call of the step is counted only if it was made after the step's interface counters had been read.
    """
    leaving: dict[int, float] = defaultdict(float)
    for rank in calls.ranks:
        leaving[calls.topology.nodes[rank.number]] += 0
        for key, count in (rank.late if late else rank.rows).get(step, {}).items():
            group = calls.group(rank, key.group)
            leaving[calls.topology.nodes[rank.number]] += sent(
                rank.number, key, count, group, calls.topology
            ).between
    return dict(leaving)
