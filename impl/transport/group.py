"""The group of ranks along one axis, as transports and collectives see it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from impl.plan.topology import Axis


class MeshError(RuntimeError):
    """The process group does not fit the topology, or has ended; the message names sizes or ranks."""


@dataclass(slots=True, eq=False)
class Group:
    """This rank's group along one axis."""

    axis: Axis
    ranks: tuple[int, ...]  # of the mesh, ascending
    index: int  # of this rank among them
    same_node: bool  # whether all of them share this rank's node
    handle: weakref.ref[dist.ProcessGroup]  # of torch's group, which torch alone holds
    counting: str = ""  # how errors say that ranks are counted
    others: Sequence[int] = field(init=False)  # indices of the other ranks, from the next one on

    def __post_init__(self) -> None:
        self.others = [(self.index + step) % self.size for step in range(1, self.size)]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group.  Raises MeshError: after ``destroy_process_group()``."""
        if (group := self.handle()) is None:
            raise MeshError(
                f"the process group of ranks {self.ranks} along {self.axis.name} was destroyed{self.counting}"
            )
        return group

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)
