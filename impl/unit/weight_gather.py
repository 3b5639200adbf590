"""The all-gather of one unit's weights: the mirror of :mod:`impl.unit.gradient_reduction`.

The way of a weight shard through a ZeRO++ step, told for two nodes of two ranks, in the order in which its
files are met.  A unit of P padded elements is cut into shards of S = P / 4; a shard's frame, its codes and
scales, has F bytes.  Rank = (node, local).

1. *The master is encoded.*  :mod:`impl.unit.master_shard` holds the shard as ``master`` (S,) fp32 and
   writes its frame (F,) uint8 straight into the message of the first hop; with an INT8 codec that is qwZ
   (paper section 3.1).
2. *Hop 1 crosses the link.*  :class:`impl.comm.all_gather.FrameGather` all-gathers along ``node``, among
   the ranks of equal local index: (node, F) = (2, F) uint8.
3. *The secondary is kept.*  Those frames are hpZ's secondary shard (section 3.2), copied by
   :mod:`impl.unit.secondary_shard`, in 16 bits where the policy says so, and, unchanged, the message of the
   next hop.
4. *Hop 2 stays inside the node*, along ``local``: (local, node, F) = (2, 2, F) uint8.  Every rank now has
   every frame, its own too, and all decode the same bytes: replicas are equal to the bit.
5. *The frames are decoded* into the flat buffer (P,) of :mod:`impl.unit.flat_buffer`, seen as (local, node,
   S), of which the parameters are views.  Frames that are their elements, as without quantisation, are not
   decoded where the only hop is gloo's: messages arrive in the flat buffer, as does the cast of one rank.
6. *The forward pass computes with it*, and :mod:`impl.unit.unit` reshards: the memory goes, unless the
   schedule keeps the unit for backward, and the secondary stays.
7. *Backward gathers again*, from the secondary: it is written to the message of hop 2, as it is kept, and
   nothing crosses the link.
8. *The optimizer steps the masters*: the secondary is stale, and the next forward pass begins at 1.  Where
   the policy sends differences, it encodes how far the master is from its copy in the secondary, and step 3
   adds what came to the copies ([Note: differences] in :mod:`impl.unit.secondary_shard`).

Hooks call :meth:`Unit.pre_forward`, whose ``all_gather`` starts this and what
:mod:`impl.plan.prefetch_schedule` wants ahead, awaits it, and shows modules the parameters; what a parameter
is after each event is a table of docs/design/engine.md.
"""

from __future__ import annotations

from typing import get_args

import torch

from impl import ops
from impl.codecs.codec import Blocked
from impl.codecs.planes import turn
from impl.codecs.reference import DTYPES
from impl.comm.all_gather import FrameGather, are_elements
from impl.plan.shard_layout import Band, UnitGeometry
from impl.plan.traffic import Phase, Purpose, Tag
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.master_shard import MasterShard, Version
from impl.unit.secondary_shard import SecondaryShard


class WeightGather:
    """The all-gathers of one unit on one rank to ``flat``; the policy of ``context`` is this unit's own.

    Attributes:
        secondary: hpZ's copy.
        keeps: whether it keeps anything.
        version: of the weights that are gathered.
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard, flat: FlatBuffer
    ) -> None:
        policy, wire = context.policy, context.wire
        shard, topology = geometry.shard, wire.mesh.topology
        self._geometry, self._wire, self._master_shard, self._flat = geometry, wire, master_shard, flat
        self._axes, self._spared = policy.gather_axes(topology)  # hops; how many the secondary spares
        purpose: Purpose = "persistent" if geometry.persistent else "weights"
        self._codecs = policy.candidates.get("weights", (policy.weights,))
        self._tags = {phase: Tag(phase, purpose, geometry.name) for phase in get_args(Phase)}
        before, after = self._axes[: self._spared], self._axes[self._spared :]
        self.keeps = bool(before)
        offloaded = master_shard.placement.frames
        self.secondary = SecondaryShard(geometry, context, before, offloaded=offloaded)
        self._clock, self._sends_copy = context.clock, policy.sends_copy
        self._differences = policy.differences
        self._codec, self._kept_codec = policy.weights, self.secondary.codec
        self._frame = policy.planes * self._codec.frame_bytes(shard)
        kept, copies = self._kept_codec.frame_bytes(shard), self.secondary.copies
        self._bands, self._rows = list[tuple[Band, ...]](), 0  # of two planes, by shard; rows of a band
        if policy.planes > 1 and isinstance(self._codec, Blocked):
            self._rows = self._codec.block_size(shard)
            self._bands = [geometry.bands(index, self._rows) for index in range(geometry.shards)]
        ring = self._axes == (topology.world_axis,)
        self._between = FrameGather(wire, before, self._frame) if before else None
        self._difference: FrameGather | None = None  # gathers differences
        if policy.differences is not None and before:
            self._difference = FrameGather(wire, before, policy.differences.frame_bytes(shard))
        self._last = FrameGather(wire, after, copies * self._frame, ring=ring)
        self._again = FrameGather(wire, after, copies * kept, ring=ring) if before else None
        # Rows of frames as rank digits, the last axis first, and where each shard lies in the flat buffer.
        sizes = tuple(axis.size for axis in reversed(self._axes))
        self._sent, self._kept = (*sizes, self._frame), (*sizes, kept)
        self._placed = (*sizes, shard), (*(axis.stride * shard for axis in reversed(self._axes)), 1)
        plain = are_elements(self._codec, DTYPES[policy.compute], shard)
        sending = [axis for axis in self._axes if axis.size > 1]
        self._alone = plain and not sending and not before
        # Messages arrive in the flat buffer where the wire lets go of their memory: a reference of its own
        # would look like somebody's view ([Note: flat buffer]).
        self._in_place = plain and len(sending) == 1 and not before and wire.lets_go(sending[0])
        self._under_way: FrameGather | None = None
        self._arrival: Arrival | None = None  # of what follows the first hop, beside a GPU's computation
        self._tag = self._tags["forward"]
        self.version: Version = (-1, -1)

    def reserve(self) -> None:
        """Make room in shared memory for the largest messages; all ranks must call it."""
        held = max(codec.frame_bytes(self._geometry.shard) for codec in self._codecs)
        kept = max(held, self._kept[-1])
        if self._differences is not None:  # or copies of a resumed run
            held = max(held, kept, self._differences.frame_bytes(self._geometry.shard))
        for hop, axis in enumerate(self._axes):
            self._wire.reserve(axis, max(held, kept) if hop >= self._spared else held)
            held, kept = held * axis.size, kept * axis.size

    def start(self, phase: Phase) -> None:
        """Encode this rank's frame, or take it from the secondary, and post hop 1: steps 1, 2 and 7."""
        self._under_way = self._arrival = None  # of one that was interrupted
        tag, flat = self._tags[phase], self._flat
        self._tag, self.version = tag, self._master_shard.version
        if self._alone:
            self._master_shard.write_frame(flat.attach().view(torch.uint8))
            return
        if self._again is not None and self.secondary.holds(self.version):
            self._under_way = self._again
            self.secondary.write(self._again.open(tag))
        elif self._difference is not None and self.secondary.sends_difference(self._clock.step):
            assert self._differences is not None  # noqa: S101  # the policy sends them
            if self.secondary.pending:
                self._gather_copies()
            self._under_way = self._difference
            message = self._difference.open(tag)
            copy, settled = self.secondary.own(), self.secondary.settled(self.version)
            self._master_shard.write_difference(self._differences, copy, message, nothing=settled)
        else:
            self._under_way = self._between or self._last
            into = flat.attach().view(torch.uint8) if self._in_place else None
            message = self._under_way.open(tag, into)
            if self._bands:
                own = self._wire.mesh.rank % self._geometry.shards
                self._master_shard.write_planes(message, self._bands[own], self._rows)
            else:
                self._master_shard.write_frame(message)
        self._under_way.post()
        if (stream := self._wire.gathers) is not None:
            flat.attach()  # memory of the computation's stream, which uses it last
            with self._wire.beside(stream) as arrival:
                self.finish()
            self._arrival = arrival

    def finish(self) -> None:
        """Wait for all hops, keep hpZ's copy, and decode the frames to the flat buffer: steps 3 to 5.

        Of two planes that of columns in backward, else that of rows.
        """
        if self._arrival is not None:
            self._wire.join(self._arrival)
            self._arrival = None
        if (gather := self._under_way) is None:  # alone, or received beside the computation
            return
        if gather is self._between or gather is self._difference:
            gather = self._forward_copy(gather)
        rows = gather.finish()
        if gather is self._again:
            ops.decode(self._kept_codec, rows.view(self._kept), self._flat.attach().as_strided(*self._placed))
        elif not self._in_place:
            frames, flat = rows.view(self._sent), self._flat.attach()
            columns, plane = self._bands and self._tag.phase == "backward", self._frame // 2
            if self._bands:
                frames = frames[..., plane:] if columns else frames[..., :plane]
            ops.decode(self._codec, frames, flat.as_strided(*self._placed))
            if columns:
                for shard, bands in zip(flat.view(len(self._bands), -1), self._bands, strict=True):
                    turn(shard, bands, self._rows, back=True)
        gather.close()
        self._under_way = None

    def _forward_copy(self, between: FrameGather) -> FrameGather:
        """Keep what the hops between nodes brought, and post it along the hops inside them."""
        rows = between.finish()  # (node, F), or their differences
        if between is self._difference:
            self.secondary.add(rows, self.version)
        else:
            self.secondary.keep(rows, self.version, step=self._clock.step)
        onward = self._last
        if self._sends_copy:
            assert self._again is not None  # noqa: S101  # there is a copy
            onward = self._again
            self.secondary.write(onward.open(self._tag))
        else:
            message = onward.open(self._tag)
            message.view(rows.shape).copy_(rows)
        between.close()
        onward.post()
        self._under_way = onward
        return onward

    def _gather_copies(self) -> None:
        """Gather the copies that differences begin with, of which each rank has loaded its own shard's."""
        before = self._axes[: self._spared]
        own = self.secondary.own().contiguous().view(torch.uint8)
        gather = FrameGather(self._wire, before, self._kept[-1])
        gather.open(Tag("forward", "state", self._geometry.name)).copy_(own)
        gather.post()
        self.secondary.fill(gather.finish())
        gather.close()
