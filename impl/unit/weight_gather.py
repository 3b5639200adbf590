"""The all-gather of one unit's weights: the mirror of :mod:`impl.unit.gradient_reduction`.

The way of a weight shard through a ZeRO++ step, told for two nodes of two ranks, in the order in which its
files are met.  A unit of P padded elements is cut into shards of S = P / 4; a shard's frame, its codes and
scales, has F bytes.  Rank = (node, local).

1. *The master is encoded.*  :mod:`impl.unit.master_shard` holds the shard as ``master`` (S,) fp32 and
   writes its frame (F,) uint8 straight into the message of the first hop; with an INT8 codec that is qwZ
   (paper section 3.1).
2. *Hop 1 crosses the link.*  :func:`impl.comm.all_gather.gather_frames` all-gathers along ``node``, among
   the ranks of equal local index: (node, F) = (2, F) uint8.
3. *The secondary is kept.*  Those frames are hpZ's secondary shard (section 3.2), copied by
   :mod:`impl.unit.secondary_shard`, in 16 bits where the policy says so, and, unchanged, the message of the
   next hop.
4. *Hop 2 stays inside the node*, along ``local``: (local, node, F) = (2, 2, F) uint8.  Every rank now has
   every frame, its own too, and all decode the same bytes: replicas are equal to the bit.
5. *The frames are decoded* into the flat buffer (P,) of :mod:`impl.unit.flat_buffer`, seen as (local, node,
   S), of which the parameters are views.  Where a frame is its elements, as without quantisation, and the
   only hop is gloo's, they are not: its messages arrive in the flat buffer.
6. *The forward pass computes with it*, and :mod:`impl.unit.unit` reshards: the memory goes, the secondary
   stays.
7. *Backward gathers again*, from the secondary: it is written to the message of hop 2, as it is kept, and
   nothing crosses the link.
8. *The optimizer steps the masters*: the secondary is stale, and the next forward pass begins at 1.

What happens when is :mod:`impl.plan.prefetch_schedule`'s to say and :mod:`impl.engine.forward_hooks`' to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

from torch import Tensor

from impl import ops
from impl.codecs.reference import DTYPES
from impl.comm.all_gather import are_elements, as_frames, gather_frames, gathered, placed, sending
from impl.comm.ledger import Tag
from impl.comm.transfer import Steps
from impl.comm.wire import Exchange
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import Phase, Purpose
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.master_shard import MasterShard
from impl.unit.secondary_shard import SecondaryShard


class WeightGather:
    """The all-gathers of one unit on one rank; the policy of ``context`` is this unit's own.

    Attributes:
        secondary: hpZ's copy.
    """

    def __init__(self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard) -> None:
        policy, self._wire = context.policy, context.wire
        topology = self._wire.mesh.topology
        self._geometry, self._master_shard = geometry, master_shard
        self._codec, self._dtype = policy.weights, DTYPES[policy.compute]
        self._axes, self._spared = policy.gather_axes(topology)  # hops; how many the secondary spares
        self._ring = self._axes == (topology.world_axis,)
        self._frame = policy.weights.frame_bytes(geometry.shard)  # F
        self._copies = math.prod(axis.size for axis in self._axes[: self._spared])  # frames of hpZ's copy
        self._in_place = self._arrives_in_place()
        purpose: Purpose = "persistent" if geometry.persistent else "weights"
        self._tags = {phase: Tag(phase, purpose, geometry.name) for phase in get_args(Phase)}
        offloaded = master_shard.placement.frames
        self.secondary = SecondaryShard(
            geometry.name, geometry.shard, policy, context.host, context.meter, offloaded=offloaded
        )

    def reserve(self) -> None:
        """Make room in shared memory for the largest messages; all ranks must call it."""
        held, kept = self._frame, self.secondary.codec.frame_bytes(self._geometry.shard)
        for hop, axis in enumerate(self._axes):
            self._wire.reserve(axis, max(held, kept) if hop >= self._spared else held)
            held, kept = held * axis.size, kept * axis.size

    def gathering(self, phase: Phase, flat: FlatBuffer) -> Steps[None]:
        """Bring all shards together in ``flat``; steps 1 to 5, or 7, of this module's account.

        Args:
            phase: for the ledger.
            flat: where the weights are put.
        """
        tag, axes, codec, nbytes = self._tags[phase], self._axes, self._codec, self._frame
        write: Callable[[Tensor], None] = self._master_shard.write_frame
        if self._spared:
            version = self._master_shard.version
            if self.secondary.holds(version):
                write, codec = self.secondary.write, self.secondary.codec
            else:
                between = yield from gather_frames(self._wire, axes[: self._spared], write, nbytes, tag)
                self.secondary.keep(between.wait(), version)  # (node, F)
                write = partial(_pass_on, between)
            axes = axes[self._spared :]
            nbytes = self._copies * codec.frame_bytes(self._geometry.shard)
        landing = as_frames(self._codec, flat.attach(), self._geometry.shard) if self._in_place else None
        exchange = yield from gather_frames(
            self._wire, axes, write, nbytes, tag, ring=self._ring, into=landing
        )
        if landing is None:
            frames = gathered(exchange, axes, nbytes)  # (local, bytes of the message)
            frame = codec.frame_bytes(self._geometry.shard)
            frames = frames.view(*(axis.size for axis in self._axes[::-1]), frame)  # (local, node, F)
            ops.decode(codec, frames, placed(flat.attach(), self._axes[::-1], self._geometry.shard))
        exchange.close()

    def _arrives_in_place(self) -> bool:
        """Whether messages may arrive in the flat buffer, to be used as they are.

        So they may where the wire lets go of their memory: a reference of its own would look like somebody's
        view ([Note: flat buffer]).
        """
        (axis, *more) = sending(self._axes)
        plain = are_elements(self._codec, self._dtype, self._geometry.shard)
        return plain and axis.size > 1 and not more and not self._spared and self._wire.lets_go(axis)


def _pass_on(received: Exchange, frame: Tensor) -> None:
    """Write what an exchange brought to the next one's message."""
    rows = received.wait()
    frame.view(rows.shape).copy_(rows)
    received.close()
