"""All-gathers one unit's weights; the counterpart for gradients is :mod:`impl.unit.gradient_reduction`.

The list follows a shard of weights through one ZeRO++ step on two nodes of two ranks, and names the files that
take part.  A unit has P elements with padding, and each of the four ranks holds a shard of S = P / 4 elements.
A frame is one encoded shard, codes and scales, and has F bytes.

1. *The master is encoded.*  :mod:`impl.unit.master_shard` holds the shard (S,) in fp32, and encodes it
   straight into the message of the first hop: one frame (F,) uint8.  With an INT8 codec this is qwZ (paper
   section 3.1).
2. *Hop 1 crosses the link between nodes.*  :class:`impl.comm.all_gather.FrameGather` all-gathers along the
   axis ``node``, among the ranks of equal local index: (node, F) = (2, F) uint8.
3. *The secondary shard is kept.*  The received frames are hpZ's secondary shard (section 3.2).
   :mod:`impl.unit.secondary_shard` keeps a copy of them, in another codec such as bf16 if the policy says so.
   The frames are also, unchanged, the message of hop 2, unless the policy sends the copy there.
4. *Hop 2 stays inside the node*, along the axis ``local``: (local, node, F) = (2, 2, F) uint8.  Every rank now
   has every frame, including its own, and all ranks decode the same bytes, so their weights are bit-equal.
5. *The frames are decoded* into the flat buffer (P,) of :mod:`impl.unit.flat_buffer`, viewed as
   (local, node, S); the parameters are views of this buffer.  There are two shortcuts: if frames are the
   elements themselves and gloo carries the only hop, messages arrive in the flat buffer and nothing is
   decoded; a single rank casts its master into the flat buffer.
6. *The forward pass computes with the weights*, and :mod:`impl.unit.unit` reshards them: the flat buffer is
   given back, unless the schedule keeps the unit for backward.  The secondary shard stays.
7. *The backward pass gathers again*, from the secondary shard, which is written to the message of hop 2.
   Nothing crosses the link between nodes.
8. *The optimizer steps the masters.*  Now the secondary shard is stale, and the next forward pass begins at
   step 1.  If the policy sends differences, step 1 encodes the difference between the master and its copy in
   the secondary shard, and step 3 adds the difference to the copies ([Note: differences] in
   :mod:`impl.unit.secondary_shard`).

:meth:`impl.unit.unit.Unit.all_gather` starts this sequence, starts the gathers of units that run next, as
:mod:`impl.plan.prefetch_schedule` says, and waits.  docs/design/engine.md has a table of a parameter's states.

What is sent along which hops is one of several *paths*, and each path is a class below: its ``start`` posts
the first hop, and its ``finish`` does the rest.
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
    """All-gathers one unit on one rank into its flat buffer, ``flat``.

    The policy of ``context`` is the unit's own.
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard, flat: FlatBuffer
    ) -> None:
        policy, wire, shard = context.policy, context.wire, geometry.shard
        self.geometry, self.wire, self.clock = geometry, wire, context.clock
        self.master_shard, self.flat = master_shard, flat
        # The axes of all hops, first hop first, and how many of the first hops a gather skips while the secondary
        # shard is current.
        self.axes, self.spared = policy.gather_axes(wire.mesh.topology)
        wire.make_groups(self.axes)
        sizes, strides = zip(*((axis.size, axis.stride * shard) for axis in self.axes[::-1]), strict=True)
        # The shape and the strides of the view of the flat buffer that has a dimension for each axis, last hop
        # first, and one for the elements of a shard.
        self.target = ((*sizes, shard), (*strides, 1))
        between, offloaded = self.axes[: self.spared], master_shard.placement.frames
        self.secondary = SecondaryShard(geometry, context, between, offloaded=offloaded)
        self.version: Version = (-1, -1)  # the version of the weights that are gathered
        purpose: Purpose = "persistent" if geometry.persistent else "weights"
        self._tags = {phase: Tag(phase, purpose, geometry.name) for phase in get_args(Phase)}
        plain = are_elements(policy.weights, DTYPES[policy.compute], shard) and not between
        sending = [axis for axis in self.axes if axis.size > 1]
        self._alone = plain and not sending
        # Messages may arrive in the flat buffer, unless the wire keeps a reference to its memory afterwards, which
        # FlatBuffer would take for a view that autograd holds.
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
        self._path: _Frames | _Between | None = None  # the path of the gather under way
        self._arrival: Arrival | None = None  # on a GPU, the end of the hops after the first

    def start(self, phase: Phase) -> None:
        """Encode this rank's frame, or take frames from the secondary shard, and post the first hop.

        These are steps 1, 2 and 7 of the list above.  On a GPU, all later hops are enqueued on a side stream.
        """
        self._path = self._arrival = None  # an interrupted gather may have left them
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
            self.flat.attach()  # here, since the memory belongs to the stream of the computation
            with self.wire.beside(stream, posted=path.sends) as arrival:
                self.finish()
            self._arrival = arrival

    def finish(self) -> None:
        """Wait for all hops, keep hpZ's copy, and decode the frames into the flat buffer.

        These are steps 3 to 5 of the list above.
        """
        if self._arrival is not None:
            self.wire.join(self._arrival)
            self._arrival = None
        if self._path is not None:  # None with one rank, and if the side stream has finished the path
            self._path.finish()
            self._path = None


class _Frames:
    """The path of the masters' frames over all hops, or over the hops inside a node after :class:`_Between`."""

    def __init__(
        self, gather: WeightGather, codec: Codec, *, planes: int = 1, in_place: bool = False
    ) -> None:
        self._gather, self._codec, self._in_place = gather, codec, in_place
        nbytes = planes * codec.frame_bytes(gather.geometry.shard)
        ring = gather.axes == (gather.wire.mesh.topology.world_axis,)
        axes, copies = gather.axes[gather.spared :], gather.secondary.copies
        self._hops = FrameGather(gather.wire, axes, copies * nbytes, ring=ring)
        self.sends = self._hops.sends
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
    """The path of two planes (``planes=2``): the weights are sent twice, quantised once along rows, once along columns.

    The forward pass decodes the plane of rows, the backward pass the plane of columns.
    """

    def __init__(self, gather: WeightGather, codec: Blocked) -> None:
        super().__init__(gather, codec, planes=2)
        self._rows = codec.block_size(gather.geometry.shard)  # the number of rows in a band
        # the bands of each shard
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
    """The path of hpZ's copies over the hops inside a node."""

    def start(self, tag: Tag) -> None:
        self._gather.secondary.write(self._hops.open(tag))
        self._hops.post()

    def pass_on(self, tag: Tag, frames: Tensor) -> None:
        self.start(tag)  # sends the copies that were kept, not the frames that arrived


class _Between:
    """The path of the masters' frames over the hops between nodes, after which hpZ's copy of them is kept.

    ``onward`` is the path that then sends the frames, or their copies, over the hops inside the node.
    """

    def __init__(self, gather: WeightGather, codec: Codec, onward: _Frames) -> None:
        self._gather, self._codec, self._onward = gather, codec, onward
        nbytes = codec.frame_bytes(gather.geometry.shard)
        self._hops = FrameGather(gather.wire, gather.axes[: gather.spared], nbytes)
        self.sends = self._hops.sends

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
    """The path of differences between masters and copies over the hops between nodes.

    See [Note: differences] in :mod:`impl.unit.secondary_shard`.
    """

    def _write(self, message: Tensor) -> None:
        gather, master = self._gather, self._gather.master_shard.master
        settled = gather.secondary.settled(gather.version)
        difference = torch.zeros_like(master) if settled else master - gather.secondary.copy_of_shard()
        ops.encode(self._codec, difference, message, noise=gather.master_shard.noise(self._codec))

    def _keep(self, frames: Tensor) -> None:
        self._gather.secondary.add(frames, self._gather.version)
