"""Defines the topology (nodes and ranks per node) and the axes, which divide all ranks into groups that communicate.

A topology is a value that the caller chooses, so that two-node algorithms can run and be tested on one machine.
Ranks are numbered ``rank = node * ranks_per_node + local``.  Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Axis(NamedTuple):
    """A way to divide all ranks into groups of ``size`` ranks, whose numbers are ``stride`` apart.

    With 2 nodes of 4 ranks, the axis ``node`` (size 2, stride 4) has the groups (0, 4), (1, 5), (2, 6), (3, 7).  If
    these ranks are written as two digits (node, local), the axis is the first digit: the ranks of a group differ only
    in this digit.
    """

    name: str  # the name under which the ledger and the process groups list the axis
    size: int  # number of ranks in a group
    stride: int  # difference between the numbers of neighbouring ranks of a group

    def digit(self, rank: int) -> int:
        """Returns the index of ``rank`` inside its group along this axis."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of ``rank``'s group along this axis, ascending."""
        first = rank - self.digit(rank) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))


@dataclass(frozen=True, slots=True)
class Topology:
    """Says how many nodes there are, and how many ranks each node has.

    Raises ValueError: if either number is not positive.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(f"a topology needs at least 1 node and 1 rank per node, got {self}")

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Returns the index of the node on which ``rank`` runs."""
        return rank // self.ranks_per_node

    @property
    def world_axis(self) -> Axis:
        """The axis along which all ranks form one group."""
        return Axis("world", self.world, 1)

    @property
    def node_axis(self) -> Axis:
        """The axis along which the ranks with the same local index form a group, one rank on each node."""
        return Axis("node", self.nodes, self.ranks_per_node)

    @property
    def local_axis(self) -> Axis:
        """The axis along which the ranks of one node form a group."""
        return Axis("local", self.ranks_per_node, 1)

    def crosses(self, axis: Axis) -> bool:
        """Returns whether the groups along ``axis`` have ranks on more than one node."""
        return axis.size > 1 and axis.stride * axis.size > self.ranks_per_node

    def check_group(self, name: str, ranks: int) -> None:
        """Check that this topology can be cut into groups of ``ranks`` ranks; 0 means no group.

        All groups have equally many ranks, and a group is either a part of a node or some whole nodes.  With 4 nodes of
        6 ranks, groups of 1, 2, 3, 6, 12 and 24 ranks are possible.  ``name`` is the subject of the error message, such
        as ``a group``.

        Raises ValueError: if groups of ``ranks`` ranks are not possible.
        """
        per_node, world = self.ranks_per_node, self.world
        if ranks < 0 or (ranks and per_node % ranks and (ranks % per_node or world % ranks)):
            raise ValueError(
                f"{name} of {ranks} ranks does not fit {self.nodes} nodes x {per_node} ranks: choose a number "
                f"that divides {per_node}, or a multiple of {per_node} that divides {world}"
            )

    def gather_axes(self, secondary: int) -> tuple[tuple[Axis, ...], int]:
        """Returns (axes, before): the axes of a hierarchical all-gather, and how many of its hops bring hpZ's copy.

        A hop is one exchange of messages along one axis of ranks.  ``axes`` has one axis for each hop, first hop first.
        The product of the axes' sizes is the number of all ranks.  A hop along an axis of one rank sends nothing.

        The first ``before`` hops bring each rank its part of hpZ's copy of the weights.  A backward gather starts from
        this copy, and therefore sends only the later hops.

        With 2 nodes of 4 ranks:

        - ``secondary=4`` gives ((node, local), 1).  The 4 ranks of a node share one copy, so backward gathers skip the
          hop between nodes.
        - ``secondary=2`` gives ((node, outer, inner), 2).  Each node has two pairs of ranks, and each pair shares one
          copy.  The axis ``inner`` is inside a pair, and the axis ``outer`` is between the two pairs of a node.

        Args:
            secondary: number of ranks that share one copy; 0 if there is no copy, and ``before`` is then 0.  It must
                pass :meth:`check_group`.
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
    """Returns the ``ranks`` as text in ascending order, such as ``rank 3`` or ``ranks 0, 2 and 5``."""
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
