"""The group of ranks along one axis, as transports and collectives see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from impl.plan.topology import Axis


@dataclass(slots=True, eq=False)
class Group:
    """This rank's group along one axis.

    Attributes:
        axis: which digit of the rank number varies.
        ranks: global ranks, ascending.
        index: this rank's place among them.
        same_node: whether all of them share this rank's node.
        process_group: torch's handle.
    """

    axis: Axis
    ranks: tuple[int, ...]
    index: int
    same_node: bool
    process_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)
