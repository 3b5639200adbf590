"""Defines :class:`Group`, the ranks along one axis of a mesh, among which transports and collectives send messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from impl.policy.topology import Axis


class MeshError(RuntimeError):
    """Raised if a mesh cannot be made or its process groups cannot be used; the message says why, and what to do."""


def no_group() -> None:
    """Return None; this function is :attr:`Group.handle` if the ranks are threads, which have no process groups."""


@dataclass(slots=True, eq=False)
class Group:
    """This rank's group along one axis of a mesh: the ranks that exchange messages along this axis."""

    axis: Axis
    ranks: tuple[int, ...]  # the ranks of the group as the mesh counts them, ascending
    index: int  # the index of this rank in ``ranks``
    same_node: bool  # whether all ranks of the group are on this rank's node
    # A function that returns torch's process group, or None once the group was destroyed.  It is a weak reference, so
    # that only torch keeps the group alive.  If the ranks are threads, it is the function no_group().
    handle: Callable[[], dist.ProcessGroup | None]
    counting: str = ""  # added to errors that name ranks: says how the mesh counts ranks
    # Indices in ``ranks`` of all other ranks, from the next rank on; for index 2 of 4 ranks: [3, 0, 1].
    others: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.others = [(self.index + step) % self.size for step in range(1, self.size)]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's process group for the ranks of this group.

        Raises:
            MeshError: if ``destroy_process_group()`` has been called, or if the ranks are threads.
        """
        if self.handle is no_group:
            raise MeshError(
                "ranks that are threads have no process groups: use the wire, or run the ranks as processes"
            )
        if (group := self.handle()) is None:
            raise MeshError(
                f"the process group of ranks {self.ranks} along {self.axis.name} was destroyed: use the mesh "
                f"before destroy_process_group(){self.counting}"
            )
        return group

    def backend(self, device_type: str) -> str:
        """Return the name of the backend that sends tensors of ``device_type``, such as ``gloo`` for ``cpu``.

        If the ranks are threads, the name is ``threads``.
        """
        if self.handle is no_group:
            return "threads"
        name = str(dist.get_backend(self.process_group))  # "cpu:gloo,cuda:nccl" if it has one for each type
        if ":" not in name:
            return name
        return dict(part.split(":") for part in name.split(","))[device_type]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)
