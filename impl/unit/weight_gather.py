"""The all-gather of one unit's weights: the mirror of :mod:`impl.unit.gradient_reduction`.

The path of a weight shard through a ZeRO++ step, on two nodes of two ranks, file by file.  A unit of P padded
elements is cut into shards of S = P / 4; a frame, a shard's codes and scales, has F bytes.

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
   S); the parameters are views of it.  Unquantised frames are their elements and not decoded where the only
   hop is gloo's: messages arrive in the flat buffer.  One rank alone casts into it.
6. *The forward pass computes with it*, and :mod:`impl.unit.unit` reshards: the memory goes, unless the
   schedule keeps the unit for backward, and the secondary stays.
7. *Backward gathers again*, from the secondary, which is written to the message of hop 2; nothing crosses
   the link.
8. *The optimizer steps the masters*: the secondary is stale, and the next forward pass begins at 1.  Where
   the policy sends differences, step 1 encodes the master's difference from its copy in the secondary, and
   step 3 adds it to the copies ([Note: differences] in :mod:`impl.unit.secondary_shard`).

:meth:`impl.unit.unit.Unit.all_gather` starts this, gathers ahead as :mod:`impl.plan.prefetch_schedule` says,
and waits; docs/design/engine.md has a table of a parameter's states.  Each path is a class: its ``start``
posts the first hop, and its ``finish`` does all else.
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
    """The all-gathers of one unit on one rank to ``flat``; the policy of ``context`` is the unit's own."""

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard, flat: FlatBuffer
    ) -> None:
        policy, wire, shard = context.policy, context.wire, geometry.shard
        self.geometry, self.wire, self.clock = geometry, wire, context.clock
        self.master_shard, self.flat = master_shard, flat
        # a current copy spares the first of these axes
        self.axes, self.spared = policy.gather_axes(wire.mesh.topology)
        wire.make_groups(self.axes)
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
        # Messages arrive in the flat buffer unless the wire keeps a reference, which would look like a view.
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
        self._path: _Frames | _Between | None = None  # of the gather under way
        self._arrival: Arrival | None = None  # of the hops after the first, beside a GPU's computation

    def start(self, phase: Phase) -> None:
        """Encode this rank's frame, or take it from the secondary, and post hop 1: steps 1, 2 and 7."""
        self._path = self._arrival = None  # of an interrupted gather
        self.version = self.master_shard.version
        if self._alone:
            self.master_shard.write_frame(self.flat.attach().view(torch.uint8))
            return
        path = self._weights
        if self._copy is not None and self.secondary.holds(self.version):
            path = self._copy
        elif self._differences is not None and self.secondary.sends_difference(self.clock.step):
            path = self._differences
        self._path = path
        path.start(self._tags[phase])
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
        if self._path is not None:  # else alone, or received beside the computation
            self._path.finish()
            self._path = None


class _Frames:
    """Path of masters' frames over all hops or, once they crossed nodes, over the hops inside a node."""

    def __init__(
        self, gather: WeightGather, codec: Codec, *, planes: int = 1, in_place: bool = False
    ) -> None:
        self._gather, self._codec, self._in_place = gather, codec, in_place
        nbytes = planes * codec.frame_bytes(gather.geometry.shard)
        ring = gather.axes == (gather.wire.mesh.topology.world_axis,)
        axes, copies = gather.axes[gather.spared :], gather.secondary.copies
        self._hops = FrameGather(gather.wire, axes, copies * nbytes, ring=ring)
        self._shape = (*gather.target[0][:-1], nbytes)

    def start(self, tag: Tag) -> None:
        into = self._gather.flat.attach().view(torch.uint8) if self._in_place else None
        self._gather.master_shard.write_frame(self._hops.open(tag, into))
        self._hops.post()

    def pass_on(self, tag: Tag, frames: Tensor) -> None:
        self._hops.open(tag).view(frames.shape).copy_(frames)
        self._hops.post()

    def finish(self) -> None:
        frames = self._hops.finish()
        if not self._in_place:
            flat = self._gather.flat.attach()
            ops.decode(self._codec, frames.view(self._shape), flat.as_strided(*self._gather.target))
        self._hops.close()


class _Planes(_Frames):
    """Path of two planes: forward computes with blocks of rows, backward with blocks of columns."""

    def __init__(self, gather: WeightGather, codec: Blocked) -> None:
        super().__init__(gather, codec, planes=2)
        self._rows = codec.block_size(gather.geometry.shard)  # of a band, by shard
        self._bands = [gather.geometry.bands(index, self._rows) for index in range(gather.geometry.shards)]

    def start(self, tag: Tag) -> None:
        self._columns, rank = tag.phase == "backward", self._gather.wire.mesh.rank
        planes = self._gather.master_shard.master.expand(2, -1).clone()  # (2, S)
        turn(planes[1], self._bands[rank % len(self._bands)], self._rows)
        ops.encode(self._codec, planes, self._hops.open(tag).view(2, -1))
        self._hops.post()

    def finish(self) -> None:
        rows, columns = self._hops.finish().view(self._shape).chunk(2, -1)
        flat = self._gather.flat.attach()
        ops.decode(self._codec, columns if self._columns else rows, flat.as_strided(*self._gather.target))
        if self._columns:
            for shard, bands in zip(flat.view(len(self._bands), -1), self._bands, strict=True):
                turn(shard, bands, self._rows, back=True)
        self._hops.close()


class _Copy(_Frames):
    """Path of hpZ's copies, inside a node."""

    def start(self, tag: Tag) -> None:
        self._gather.secondary.write(self._hops.open(tag))
        self._hops.post()

    def pass_on(self, tag: Tag, frames: Tensor) -> None:
        self.start(tag)  # the kept copies


class _Between:
    """Path of masters' frames between nodes, which are kept there and go ``onward`` inside nodes."""

    def __init__(self, gather: WeightGather, codec: Codec, onward: _Frames) -> None:
        self._gather, self._codec, self._onward = gather, codec, onward
        nbytes = codec.frame_bytes(gather.geometry.shard)
        self._hops = FrameGather(gather.wire, gather.axes[: gather.spared], nbytes)

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
        self._gather.master_shard.write_frame(message)

    def _keep(self, frames: Tensor) -> None:
        self._gather.secondary.keep(frames, self._gather.version, step=self._gather.clock.step)


class _Differences(_Between):
    """Path of differences from the copies: [Note: differences] in :mod:`impl.unit.secondary_shard`."""

    def _write(self, message: Tensor) -> None:
        gather, master = self._gather, self._gather.master_shard.master
        settled = gather.secondary.settled(gather.version)
        difference = torch.zeros_like(master) if settled else master - gather.secondary.copy_of_shard()
        ops.encode(self._codec, difference, message, noise=gather.master_shard.noise(self._codec))

    def _keep(self, frames: Tensor) -> None:
        self._gather.secondary.add(frames, self._gather.version)
