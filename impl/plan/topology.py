"""Topology: nodes, ranks per node, and the axes along which collectives hop.

Pure: no torch.  A topology is a *value* that the caller chooses, so that two-node algorithms run and are
tested on one machine.  ``rank = node * ranks_per_node + local``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Axis(NamedTuple):
    """One digit of the mixed-radix rank number: the ranks that differ only in it are a group."""

    name: str  # for the ledger and the process groups
    size: int  # ranks in a group
    stride: int  # between neighbouring ranks of a group

    def digit(self, rank: int) -> int:
        """Index of ``rank`` inside its group along this axis."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s group, ascending."""
        first = rank - self.digit(rank) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))


@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` x ``ranks_per_node``.  Raises ValueError: if either count is not positive."""

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(f"a topology needs at least 1 node and 1 rank per node, got {self}")

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node on which ``rank`` lives."""
        return rank // self.ranks_per_node

    @property
    def world_axis(self) -> Axis:
        """All ranks as one group."""
        return Axis("world", self.world, 1)

    @property
    def node_axis(self) -> Axis:
        """Ranks of equal local index, one on each node."""
        return Axis("node", self.nodes, self.ranks_per_node)

    @property
    def local_axis(self) -> Axis:
        """Ranks of one node."""
        return Axis("local", self.ranks_per_node, 1)

    def crosses(self, axis: Axis) -> bool:
        """Whether groups along ``axis`` have ranks on more than one node."""
        return axis.size > 1 and axis.stride * axis.size > self.ranks_per_node

    def check_group(self, name: str, ranks: int) -> None:
        """Refuse a size of the group ``name`` that this topology cannot hold; 0 is no group.

        Raises ValueError: unless it divides a node's ranks, or is a multiple of them that divides the world.
        """
        per_node, world = self.ranks_per_node, self.world
        if ranks < 0 or (ranks and per_node % ranks and (ranks % per_node or world % ranks)):
            raise ValueError(
                f"{name} of {ranks} ranks does not fit {self.nodes} nodes x {per_node} ranks: it must divide "
                f"{per_node}, or be a multiple of it that divides {world}"
            )

    def gather_axes(self, secondary: int) -> tuple[tuple[Axis, ...], int]:
        """Hops of the hierarchical gather, first hop first, and the number of hops before hpZ's copy.

        After these a rank holds the secondary shard, which ``secondary`` ranks share: 0 for none, else a size
        that :meth:`check_group` lets pass.  A backward gather repeats the later hops alone.  The product of
        the sizes is the world; a hop of size 1 sends nothing.
        """
        per_node = self.ranks_per_node
        if secondary in (0, per_node):
            return (self.node_axis, self.local_axis), min(secondary, 1)
        if secondary < per_node:
            outer = Axis("outer", per_node // secondary, secondary)
            return (self.node_axis, outer, Axis("inner", secondary, 1)), 2
        outer = Axis("outer", self.world // secondary, secondary)
        return (outer, Axis("node", secondary // per_node, per_node), self.local_axis), 1


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 5``."""
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
