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

:meth:`Unit.all_gather` starts this, and what :mod:`impl.plan.prefetch_schedule` wants ahead, and awaits it;
what a parameter is after each event is a table of docs/design/engine.md.  Each way of a gather is a class,
whose ``start`` posts its first hop, and whose ``finish`` does all else.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Blocked, Codec
from impl.codecs.planes import turn
from impl.codecs.reference import DTYPES
from impl.comm.all_gather import FrameGather, are_elements
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import Phase, Purpose, Tag
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.master_shard import MasterShard, Version
from impl.unit.secondary_shard import SecondaryShard


class WeightGather:
    """The all-gathers of one unit on one rank to ``flat``, the policy of ``context`` being its own."""

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard, flat: FlatBuffer
    ) -> None:
        policy, wire, shard = context.policy, context.wire, geometry.shard
        self.geometry, self.wire, self.clock = geometry, wire, context.clock
        self.master_shard, self.flat = master_shard, flat
        self.axes, self.spared = policy.gather_axes(wire.mesh.topology)  # the first a current copy spares
        wire.mesh.make_groups(self.axes)
        sizes, strides = zip(*((axis.size, axis.stride * shard) for axis in self.axes[::-1]), strict=True)
        self.target = (*sizes, shard), (*strides, 1)  # of the flat buffer seen as shards by rank digits
        between, offloaded = self.axes[: self.spared], master_shard.placement.frames
        self.secondary = SecondaryShard(geometry, context, between, offloaded=offloaded)
        self.version: Version = (-1, -1)  # of the weights that are gathered
        purpose: Purpose = "persistent" if geometry.persistent else "weights"
        self._tags = {phase: Tag(phase, purpose, geometry.name) for phase in get_args(Phase)}
        plain = are_elements(policy.weights, DTYPES[policy.compute], shard) and not between
        sending = [axis for axis in self.axes if axis.size > 1]
        self._alone = plain and not sending
        # Messages arrive in the flat buffer where the wire lets go of their memory: a reference of its own
        # would look like somebody's view ([Note: flat buffer]).
        in_place = plain and len(sending) == 1 and wire.lets_go(sending[0])
        frames = _Frames(self, policy.weights, in_place=in_place)
        self._weights: _Frames | _Between = frames
        self._copy: _Copy | None = None
        self._differences: _Differences | None = None
        if policy.planes > 1 and isinstance(policy.weights, Blocked):
            self._weights = _Planes(self, policy.weights)
        if between:
            self._copy = copy = _Copy(self, policy.copy_codec)
            self._weights = _Between(self, policy.weights, copy if policy.sends_copy else frames)
            if policy.differences is not None:
                self._differences = _Differences(self, policy.differences, copy)
        self._way: _Frames | _Between | None = None  # of the gather under way
        self._arrival: Arrival | None = None  # of what follows the first hop, beside a GPU's computation

    def start(self, phase: Phase) -> None:
        """Encode this rank's frame, or take it from the secondary, and post hop 1: steps 1, 2 and 7."""
        self._way = self._arrival = None  # of one that was interrupted
        self.version = self.master_shard.version
        if self._alone:
            self.master_shard.write_frame(self.flat.attach().view(torch.uint8))
            return
        way = self._weights
        if self._copy is not None and self.secondary.holds(self.version):
            way = self._copy
        elif self._differences is not None and self.secondary.sends_difference(self.clock.step):
            way = self._differences
        self._way = way
        way.start(self._tags[phase])
        if (stream := self.wire.gathers) is not None:
            self.flat.attach()  # memory of the computation's stream, which uses it last
            with self.wire.beside(stream) as arrival:
                self.finish()
            self._arrival = arrival

    def finish(self) -> None:
        """Wait for all hops, keep hpZ's copy, and decode the frames to the flat buffer: steps 3 to 5."""
        if self._arrival is not None:
            self.wire.join(self._arrival)
            self._arrival = None
        if self._way is not None:  # else alone, or received beside the computation
            self._way.finish()
            self._way = None


class _Frames:
    """Of masters' frames, all the way; or, of those that came from other nodes, inside a node."""

    def __init__(self, of: WeightGather, codec: Codec, *, planes: int = 1, in_place: bool = False) -> None:
        self._of, self._codec, self._in_place = of, codec, in_place
        nbytes = planes * codec.frame_bytes(of.geometry.shard)
        ring = of.axes == (of.wire.mesh.topology.world_axis,)
        self._hops = FrameGather(of.wire, of.axes[of.spared :], of.secondary.copies * nbytes, ring=ring)
        self._shape = (*of.target[0][:-1], nbytes)

    def start(self, tag: Tag) -> None:
        into = self._of.flat.attach().view(torch.uint8) if self._in_place else None
        self._of.master_shard.write_frame(self._hops.open(tag, into))
        self._hops.post()

    def pass_on(self, tag: Tag, frames: Tensor) -> None:
        self._hops.open(tag).view(frames.shape).copy_(frames)
        self._hops.post()

    def finish(self) -> None:
        frames = self._hops.finish()
        if not self._in_place:
            flat = self._of.flat.attach()
            ops.decode(self._codec, frames.view(self._shape), flat.as_strided(*self._of.target))
        self._hops.close()


class _Planes(_Frames):
    """Of two planes: forward computes with blocks of rows, backward with blocks of columns."""

    def __init__(self, of: WeightGather, codec: Blocked) -> None:
        super().__init__(of, codec, planes=2)
        self._rows = codec.block_size(of.geometry.shard)  # of a band, by shard
        self._bands = [of.geometry.bands(index, self._rows) for index in range(of.geometry.shards)]

    def start(self, tag: Tag) -> None:
        self._columns, rank = tag.phase == "backward", self._of.wire.mesh.rank
        planes = self._of.master_shard.master.expand(2, -1).clone()  # (2, S)
        turn(planes[1], self._bands[rank % len(self._bands)], self._rows)
        ops.encode(self._codec, planes, self._hops.open(tag).view(2, -1))
        self._hops.post()

    def finish(self) -> None:
        rows, columns = self._hops.finish().view(self._shape).chunk(2, -1)
        flat = self._of.flat.attach()
        ops.decode(self._codec, columns if self._columns else rows, flat.as_strided(*self._of.target))
        if self._columns:
            for shard, bands in zip(flat.view(len(self._bands), -1), self._bands, strict=True):
                turn(shard, bands, self._rows, back=True)
        self._hops.close()


class _Copy(_Frames):
    """Of hpZ's copies, inside a node."""

    def start(self, tag: Tag) -> None:
        self._of.secondary.write(self._hops.open(tag))
        self._hops.post()

    def pass_on(self, tag: Tag, frames: Tensor) -> None:
        self.start(tag)  # what was kept of them


class _Between:
    """Of masters' frames between nodes, which are kept there and go ``onward`` inside nodes."""

    def __init__(self, of: WeightGather, codec: Codec, onward: _Frames) -> None:
        self._of, self._codec, self._onward = of, codec, onward
        nbytes = codec.frame_bytes(of.geometry.shard)
        self._hops = FrameGather(of.wire, of.axes[: of.spared], nbytes)

    def start(self, tag: Tag) -> None:
        self._tag = tag
        self._write(self._hops.open(tag))
        self._hops.post()

    def finish(self) -> None:
        frames = self._hops.finish()  # (node, F)
        self._keep(frames)
        self._onward.pass_on(self._tag, frames)
        self._hops.close()
        self._onward.finish()

    def _write(self, message: Tensor) -> None:
        self._of.master_shard.write_frame(message)

    def _keep(self, frames: Tensor) -> None:
        self._of.secondary.keep(frames, self._of.version, step=self._of.clock.step)


class _Differences(_Between):
    """Of how far masters are from their copies, in ``codec``: [Note: differences] in ``secondary_shard``."""

    def _write(self, message: Tensor) -> None:
        of, master = self._of, self._of.master_shard.master
        settled = of.secondary.settled(of.version)
        difference = torch.zeros_like(master) if settled else master - of.secondary.own()
        ops.encode(self._codec, difference, message, noise=of.master_shard.noise(self._codec))

    def _keep(self, frames: Tensor) -> None:
        self._of.secondary.add(frames, self._of.version)
