"""All-gathers the weights of one unit; the counterpart for gradients is :mod:`impl.unit.gradient_reduction`.

A unit is a group of parameters that are gathered and reduced together.  The list follows a shard of weights through one
ZeRO++ step on two nodes of two ranks, and names the files that take part.  The unit has P elements with padding, and
each of the four ranks holds a shard of S = P / 4 elements.  A frame is one encoded shard, codes and scales, and has F
bytes.

1. *The master is encoded.*  :mod:`impl.unit.master_shard` holds the master, which is the shard (S,) in fp32, and
   encodes it straight into the message of the first hop: one frame (F,) uint8.  With an INT8 codec this is qwZ (paper
   section 3.1).
2. *Hop 1 crosses the link between nodes.*  :class:`impl.comm.all_gather.FrameGather` all-gathers along the
   axis ``node``, among the ranks of equal local index: (node, F) = (2, F) uint8.
3. *The secondary shard is kept.*  The received frames are hpZ's secondary shard (section 3.2).
   :mod:`impl.unit.secondary_shard` keeps a copy of them, as they are or in another codec such as bf16.
   The policy decides whether hop 2 sends the received frames or this copy.
4. *Hop 2 stays inside the node*, along the axis ``local``: (local, node, F) = (2, 2, F) uint8.  Every rank now
   has every frame, including its own, and all ranks decode the same bytes, so their weights are bit-equal.
5. *The frames are decoded* into the flat buffer (P,) of :mod:`impl.unit.flat_buffer`, viewed as
   (local, node, S); the parameters are views of this buffer.  There are two shortcuts.  If frames are the
   elements themselves and gloo carries the only hop, messages arrive in the flat buffer and nothing is
   decoded.  If there is only one rank, it casts its master into the flat buffer.
6. *The forward pass computes with the weights*, and :mod:`impl.unit.unit` reshards them: the flat buffer is
   given back, unless the schedule keeps the unit for backward.  The secondary shard stays.
7. *The backward pass gathers again*, from the secondary shard, which is written to the message of hop 2.
   Nothing crosses the link between nodes.
8. *The optimizer steps the masters.*  Now the secondary shard is stale, and the next forward pass begins at step 1.  If
   the policy sends differences ([Note: differences] in :mod:`impl.unit.secondary_shard`), step 1 encodes the difference
   between the master and its copy in the secondary shard.  Step 3 adds the difference to the copies.

:meth:`impl.unit.unit.Unit.all_gather` starts this sequence.  It also starts the gathers of the units that run next,
which :mod:`impl.plan.prefetch_schedule` chooses, and then waits for the unit's own gather.  docs/design/engine.md has a
table of a parameter's states.

There are several kinds of gathers (:data:`impl.plan.hops.Sends`), which differ in what is sent: the weights, the
weights quantised by rows only or by columns only, differences of weights, or the secondary shard.
:mod:`impl.plan.hops` compiles the hops of each kind once.  :class:`~impl.comm.all_gather.FrameGather` posts the
messages of the hops.  :class:`WeightGather` chooses the kind of gather, writes the messages, keeps hpZ's copy, and
decodes the frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Blocked
from impl.codecs.planes import turn
from impl.comm.all_gather import FrameGather, forward, post_together
from impl.plan.hops import Hop, Plane, Sends, arrives_decoded, casts_alone, gather_hops, in_phase
from impl.plan.traffic import Phase, Purpose, Tag
from impl.policy.shard_layout import Band, UnitGeometry
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.master_shard import MasterShard, Version
from impl.unit.secondary_shard import SecondaryShard


class WeightGather:
    """Gathers the weights of one unit from all ranks, and decodes them into the unit's flat buffer ``flat``.

    A unit is a group of parameters that are gathered together.  There is one object for each unit on each rank.  The
    policy of ``context`` is the policy for this unit (``Policy.for_unit``).
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard, flat: FlatBuffer
    ) -> None:
        policy, wire, shard = context.policy, context.wire, geometry.shard
        self.geometry, self.wire, self.clock = geometry, wire, context.clock
        self.master_shard, self.flat, self._policy = master_shard, flat, policy
        self._gathers = {
            sends: FrameGather(
                wire, gather_hops(policy, wire.mesh.topology, shard, sends), self._write, self._keep
            )
            for sends in get_args(Sends)
        }
        hops = self._gathers["weights"].hops
        wire.make_groups(hop.axis for hop in hops)
        # Shape and strides of a view of the flat buffer: one dimension for each hop's axis, the last hop first, and one
        # for the elements of a shard.
        sizes, strides = zip(*((hop.axis.size, hop.stride * shard) for hop in hops[::-1]), strict=True)
        self.target = ((*sizes, shard), (*strides, 1))
        self.keeps_copy = policy.secondary != 0
        between = hops[: len(hops) - len(self._gathers["copy"].hops)]
        offloaded = master_shard.placement.frames
        self.secondary = secondary = SecondaryShard(geometry, context, between, offloaded=offloaded)
        self.end, self.distrust = secondary.end, secondary.distrust
        self.version: Version = (-1, -1)  # the version of the weights that are gathered
        purpose: Purpose = "persistent" if geometry.persistent else "weights"
        self._tags = {phase: Tag(phase, purpose, geometry.name) for phase in get_args(Phase)}
        self._alone = casts_alone(hops, policy.compute)
        # Whether messages arrive directly in the flat buffer.  They must not if the transport keeps a reference to the
        # buffer's memory after the wait: FlatBuffer would take the reference for a view that autograd holds.
        self._in_place = arrives_decoded(hops, policy.compute) and wire.lets_go(hops[0].axis)
        # If weights are also quantised by columns (planes): the number of rows in a band, and the bands of each shard.
        self._rows, self._bands = 0, list[tuple[Band, ...]]()
        if policy.planes != 1 and isinstance(policy.weights, Blocked):
            self._rows = policy.weights.block_size(shard)
            self._bands = [geometry.bands(index, self._rows) for index in range(geometry.shards)]
        self._columns = False  # whether the gather under way decodes weights quantised by columns
        # Whether a gather sends weights quantised only as its phase needs them: forward by rows, backward by columns.
        self._by_phase = policy.planes == "phase"
        self._under_way: FrameGather | None = None
        self._arrival: Arrival | None = None  # on a GPU, the end of the hops after the first

    def start(self, phase: Phase, *, post: bool = True) -> None:
        """Start an all-gather for a pass of this ``phase``: post the messages of the first hop.

        This rank's message has one of three contents (:meth:`SecondaryShard.sends`):

        - the frames (encoded shards) of hpZ's copy, if the copy is current;
        - the encoded difference between the shard and hpZ's copy of the shard, in a gather of differences;
        - the encoded shard, in all other cases.

        These are steps 1, 2 and 7 of the list in the module's docstring.

        On a GPU whose stream waits for messages, as with NCCL, the method also enqueues all later hops, on a side
        stream.

        On one rank without hpZ, there is no message if the codec leaves elements of the compute type unchanged.  The
        method then only casts this rank's fp32 shard into the flat buffer.

        With ``post=False`` the method only writes the message of the first hop.  :func:`start_together` then posts this
        message and enqueues the later hops.
        """
        self._under_way = self._arrival = None  # an interrupted gather may have left them
        self.version = self.master_shard.version
        if self._alone:
            self.master_shard.write_frame(self.flat.attach().view(torch.uint8))
            return
        sends = self.secondary.sends(self.version, self.clock.step) if self.keeps_copy else "weights"
        if self._by_phase:
            sends = in_phase(self._policy, phase, sends)
        gather = self._under_way = self._gathers[sends]
        self._columns = bool(self._bands) and phase == "backward"
        into = self.flat.attach().view(torch.uint8) if self._in_place else None
        gather.start(self._tags[phase], self._write, into, post=post)
        if post and (stream := self.wire.gathers) is not None:
            self.flat.attach()  # here, since the memory belongs to the stream of the computation
            with self.wire.beside(stream, posted=gather.hops[0].axis.size > 1) as arrival:
                self.finish()
            self._arrival = arrival

    def finish(self) -> None:
        """Wait for all hops (exchanges), update hpZ's copy, and decode the encoded shards into the flat buffer.

        These are steps 3 to 5 of the list in the module's docstring.
        """
        if self._arrival is not None:
            self.wire.join(self._arrival)
            self._arrival = None
        if (gather := self._under_way) is not None:  # None with one rank, and if the side stream has finished
            frames = gather.finish()
            if not self._in_place:
                self._decode(gather.hops[-1], frames)
            gather.close()
            self._under_way = None

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs to go on sending weights as differences from hpZ's copy.

        This is :meth:`SecondaryShard.state`.  The dict is empty if the policy has no differences.
        """
        return self.secondary.state(self.master_shard.version)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the ``state`` that :meth:`state` returned on this rank."""
        self.secondary.load(state, self.master_shard.version)

    def _write(self, hop: Hop, message: Tensor, received: Tensor | None = None) -> None:
        """Write the message that this rank sends in ``hop`` to ``message`` (bytes,) uint8.

        A gather consists of one or more hops, each an exchange of messages in a group of ranks.  ``received`` is what
        this rank has received in the previous hop; None for the first hop.
        """
        match hop.source:
            case "master" if hop.planes == ("rows",):
                self.master_shard.write_frame(message)
            case "master":
                self._write_planes(hop, message)
            case "difference":
                master = self.master_shard.master
                settled = self.secondary.settled(self.version)
                difference = torch.zeros_like(master) if settled else master - self.secondary.copy_of_shard()
                ops.encode(hop.codec, difference, message, noise=self.master_shard.noise(hop.codec))
            case "copy":
                self.secondary.write(message)
            case _:
                assert received is not None  # noqa: S101  # no first hop has another source
                if (
                    received.numel() > message.numel()
                ):  # both planes have arrived, and this hop sends the rows on
                    received = _plane(received.view(len(received), -1, 2 * hop.frame_bytes[0]), "rows")
                forward(hop, message, received)

    def _keep(self, hop: Hop, received: Tensor) -> None:
        """Update hpZ's copy of the weights with the frames (encoded shards) in ``received``.

        ``hop`` is the gather's last exchange of messages between nodes, in which the frames arrived.  If the frames are
        weights, they replace the copy; if they are differences, they are added to the copy.
        """
        frames = received.view(len(received), -1, hop.frame_bytes[0])
        if len(hop.planes) > 1:
            frames = _plane(frames, "columns")
        if hop.keeps == "sum":
            self.secondary.add(frames, self.version)
        else:
            self.secondary.keep(frames, self.version, step=self.clock.step)

    def _decode(self, hop: Hop, received: Tensor) -> None:
        """Decode the frames (encoded shards) in ``received`` into the flat buffer.

        ``hop`` is the gather's last exchange of messages, in which the frames arrived.
        """
        frames, flat = received.view(*self.target[0][:-1], -1), self.flat.attach()
        if len(hop.planes) > 1:
            frames = _plane(frames, "columns" if self._columns else "rows")
        ops.decode(hop.codec, frames, flat.as_strided(*self.target))
        if self._columns:
            for shard, bands in zip(flat.view(len(self._bands), -1), self._bands, strict=True):
                turn(shard, bands, self._rows, back=True)

    def _write_planes(self, hop: Hop, message: Tensor) -> None:
        """Encode this rank's fp32 shard into ``message`` by columns, or by rows and by columns, as ``hop.planes`` says.

        A plane is one of these two encodings.  In the plane "rows", which the forward pass uses, the codec's
        quantisation blocks run along the rows of a matrix.  In the plane "columns", which the backward pass uses, they
        run along the columns.  If ``message`` has both, the rows come first.
        """
        rank, count = self.wire.mesh.rank, len(hop.planes)
        planes = self.master_shard.master.expand(count, -1).clone()  # (planes, S)
        # Columns are the last plane, or the only one.
        turn(planes[-1], self._bands[rank % len(self._bands)], self._rows)
        ops.encode(hop.codec, planes, message.view(count, -1))


def start_together(gathers: Sequence[WeightGather], phase: Phase) -> None:
    """Start the gathers of several units over NCCL for a pass of this ``phase``, with few calls of NCCL.

    A hop is one exchange of a gather, along one axis of ranks.  Hops of different gathers along the same axis are
    posted with one call of NCCL.  One event on the GPU marks the end of all gathers, so ``finish()`` of any of them
    waits until all have ended.
    """
    for gather in gathers:
        gather.start(phase, post=False)
    under_way = [gather._under_way for gather in gathers if gather._under_way is not None]  # noqa: SLF001
    post_together(under_way)
    wire = gathers[0].wire
    assert wire.gathers is not None  # noqa: S101  # NCCL has side streams
    for gather in gathers:
        gather.flat.attach()  # here, since the memory belongs to the stream of the computation
    with wire.beside(wire.gathers, posted=all(each.hops[0].axis.size > 1 for each in under_way)) as arrival:
        while left := [each for each in under_way if each.left]:
            for each in left:
                each.post_next_hop(post=False)
            post_together(left)
        for gather in gathers:
            gather.finish()
    for gather in gathers:
        gather._arrival = arrival  # noqa: SLF001  # of this module's class


def _plane(frames: Tensor, plane: Plane) -> Tensor:
    """Return one half (..., F) of ``frames`` (..., 2 F) uint8: the half that is quantised by rows, or by columns.

    A frame is one encoded shard.  Here each frame has the same weights twice: the first F bytes are quantised by rows,
    the last F bytes by columns.  ``plane``, which is "rows" or "columns", chooses the half.
    """
    return frames.chunk(2, -1)[plane == "columns"]
