"""Process groups along each axis of a topology; the only place that makes any."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from impl.plan.topology import Axis, Topology
from impl.transport.group import Group


class MeshError(RuntimeError):
    """The process group at hand does not fit the topology; the message names both sizes."""


@dataclass(slots=True, eq=False)
class Mesh:
    """One rank's view of the topology.

    Attributes:
        topology: nodes and ranks per node.
        rank: this rank, ``node * ranks_per_node + local``.
        device: where tensors live.
    """

    topology: Topology
    rank: int
    device: torch.device
    _groups: dict[Axis, Group] = field(default_factory=dict)

    @classmethod
    def create(cls, topology: Topology, device: torch.device | None = None) -> Mesh:
        """Wrap the initialised default process group.

        Raises:
            MeshError: if the world size is not ``topology.world``.
        """
        world = dist.get_world_size()
        if world != topology.world:
            raise MeshError(
                f"topology {topology} needs {topology.world} ranks, the process group has {world}"
            )
        return cls(topology, dist.get_rank(), device or torch.device("cpu"))

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.topology.node_of(self.rank)

    @property
    def local(self) -> int:
        """This rank's index inside its node."""
        return self.rank % self.topology.ranks_per_node

    def group(self, axis: Axis) -> Group:
        """This rank's group along ``axis``; made at the first call, which all ranks must reach.

        Torch wants every rank to take part in making every group, so all groups of the axis are
        made here, in ascending order of their first rank.
        """
        if axis not in self._groups:
            mine: dist.ProcessGroup | None = None
            for ranks in sorted({axis.group(rank) for rank in range(self.topology.world)}):
                made = dist.new_group(list(ranks))
                if self.rank in ranks:
                    mine = made
            assert mine is not None  # noqa: S101  # every rank is in one group of every axis
            ranks = axis.group(self.rank)
            same_node = len({self.topology.node_of(rank) for rank in ranks}) == 1
            self._groups[axis] = Group(axis, ranks, ranks.index(self.rank), same_node, mine)
        return self._groups[axis]
