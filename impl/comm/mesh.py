"""Process groups: the default one, and those along each axis of a topology; the only place that makes any.

A process must end its groups before the interpreter ends.  Gloo's threads drop the tensors of a collective
after its ``wait()`` returned; a thread that does so during the interpreter's end aborts the process (status
-6, "terminate called without an active exception").  ``destroy_process_group()`` waits for these threads only
if nothing else holds the group, so a :class:`Mesh` does not hold any.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group is there: its defaults would hold it for ever
from torch._C._distributed_c10d import Store

from impl.plan.topology import Axis, Topology
from impl.transport.group import Group, MeshError


@contextlib.contextmanager
def default_group(backend: str, **options: Any) -> Iterator[None]:
    """Join the default process group; after the body it and all groups made from it have ended.

    Arguments are those of ``torch.distributed.init_process_group``.
    After an error groups stay: ending them would wait for messages that other ranks no longer send.  The
    process must then report the error and end by ``os._exit()``.
    """
    dist.init_process_group(backend, **options)
    yield
    dist.destroy_process_group()
    gc.collect()  # FSDP2 and DDP hold groups from cycles


@dataclass(slots=True, eq=False)
class Mesh:
    """One rank's view of the topology."""

    topology: Topology
    rank: int  # this rank, ``node * ranks_per_node + local``
    device: torch.device
    _groups: dict[Axis, Group] = field(default_factory=dict)

    @classmethod
    def create(cls, topology: Topology, device: torch.device | None = None) -> Mesh:
        """Wrap the default process group, of ``topology.world`` ranks or a MeshError; by default on CPUs."""
        if not isinstance(topology, Topology):
            raise MeshError(f"topology {topology!r} is a {type(topology).__name__}: expected a Topology")
        if (world := dist.get_world_size()) != topology.world:
            raise MeshError(
                f"topology {topology} needs {topology.world} ranks, the process group has {world}"
            )
        return cls(topology, dist.get_rank(), device or torch.device("cpu"))

    def store(self) -> Store | None:
        """The store of the ranks' rendezvous; None where there is none."""
        world = dist.group.WORLD if dist.is_initialized() and self.topology.world > 1 else None
        return None if world is None else world.get_group_store()

    def has_group(self, axis: Axis) -> bool:
        """Whether :meth:`group` of ``axis`` is made already, and so waits for nobody."""
        return axis in self._groups

    def group(self, axis: Axis) -> Group:
        """This rank's group along ``axis``; made at the first call, which all ranks must reach.

        A rank that does not reach it leaves the others waiting for torch's own timeout, half an hour; so
        :meth:`impl.comm.wire.Wire.group` waits for all ranks first.

        Torch wants every rank to take part in making every group, so all of the axis are made, in order.
        """
        if axis not in self._groups:
            ranks = axis.group(self.rank)
            every = sorted(map(list, {axis.group(rank) for rank in range(self.topology.world)}))
            handle, _ = dist.new_subgroups_by_enumeration(every)  # type: ignore[no-untyped-call]
            same_node = len({self.topology.node_of(rank) for rank in ranks}) == 1
            self._groups[axis] = Group(axis, ranks, ranks.index(self.rank), same_node, weakref.ref(handle))
        return self._groups[axis]
