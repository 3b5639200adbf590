"""Compiles a policy into hops, which describe the messages of a weight gather or of a gradient reduction.

A *unit* is a set of parameters that are gathered and reduced together.  A *hop* is one exchange of messages along one
axis of ranks, such as the ranks of a node.  The gather or the reduction of a unit is a tuple of :class:`Hop`, in the
order in which every rank posts the messages.  The policy names axes and codecs.  This module alone decides what each
hop sends, in which codec, and what the rank keeps of the received data.  Four parts of the project use the same tuples:

* the engine sends the messages: :mod:`impl.comm.all_gather` and :mod:`impl.unit.weight_gather` run gathers,
  :mod:`impl.comm.reduce_scatter` and :mod:`impl.unit.gradient_reduction` run reductions;
* :mod:`impl.plan.traffic` counts the bytes of the messages;
* :mod:`impl.plan.step_time` predicts the seconds that the messages take;
* :mod:`impl.plan.memory` and :mod:`impl.plan.messages` compute from them how much memory is taken by hpZ's copy of the
  weights, by the errors that error feedback carries to the next step, and by the buffers of messages.

The table lists the hops of ZeRO++ on two nodes with two ranks each.  ``source`` is what a rank sends in the hop
(:data:`Source`), and ``keeps`` is what remains on the rank after the hop (:data:`Keeps`).  A frame is one encoded shard
or, in a reduction, one encoded piece of a shard.  ``frames`` is the number of frames in the message to each other rank.

=====================  =====  =====  ========  ======  =======
collective             axis   codec  source    frames  keeps
=====================  =====  =====  ========  ======  =======
gather for forward     node   int8   master    1       copy
then                   local  int8   received  2       nothing
gather for backward    local  int8   copy      2       nothing
reduction              local  int4   gradient  2       nothing
then                   node   int4   sum       1       nothing
=====================  =====  =====  ========  ======  =======

Pure: no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from impl.codecs.codec import Codec, Raw
from impl.policy.policy import Policy
from impl.policy.shard_layout import chunked
from impl.policy.topology import Axis, Topology

Kind = Literal["all_gather", "all_to_all", "shift"]
"""How the ranks along an axis exchange messages:

- ``all_gather``: each rank sends the same message to every other rank;
- ``all_to_all``: each rank sends a different message to every other rank;
- ``shift``: in each step of a ring, each rank sends one message to the next rank.
"""

Sends = Literal["weights", "differences", "copy", "rows", "columns"]
"""What the first hop of a gather sends:

- ``weights``: the values of the masters, which are the rank's fp32 shard of the weights;
- ``differences``: the values of the masters minus hpZ's copy of them;
- ``copy``: hpZ's copy of the weights (ZeRO++'s secondary shard);
- ``rows`` or ``columns``, only with ``planes='phase'``: the values of the masters, quantised in blocks that run along
  the rows, or along the columns, of each matrix (:func:`in_phase`).
"""

Plane = Literal["rows", "columns"]
"""Whether the codec's blocks, the elements that share a scale, run along the rows or the columns of a matrix."""
_BOTH: Final[tuple[Plane, ...]] = ("rows", "columns")

Source = Literal["master", "difference", "copy", "received", "gradient", "sum", "mean"]
"""What a rank sends in a hop.

In gathers:

- ``master``: its shard of the fp32 weights, encoded;
- ``difference``: this shard minus hpZ's copy of the shard, encoded;
- ``copy``: the encoded shards that hpZ's copy consists of;
- ``received``: the encoded shards that the hop before has received, unchanged.

In reductions:

- ``gradient``: its local gradient, encoded;
- ``sum``: the sum of the gradients that the hop before has received, encoded again;
- ``mean``: the mean gradient of its piece of a shard, encoded again;
- ``received``: the encoded pieces that the hop before has received, unchanged.
"""

Keeps = Literal["nothing", "copy", "sum", "errors"]
"""What remains on the rank after a hop, in addition to the data that the next hop sends:

- ``copy``: the received frames become hpZ's copy of the weights;
- ``sum``: the received differences are added to hpZ's copy;
- ``errors``: the errors of encoding the message are carried to the next step (error feedback).
"""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of messages between the ranks along ``axis``.

    A weight gather or a gradient reduction consists of one or more hops.  In a gather, a rank sends encoded shards.  In
    a reduction, a shard may be cut into pieces, and a rank sends encoded pieces.
    """

    kind: Kind
    axis: Axis
    codec: Codec
    source: Source
    frames: int  # number of encoded shards (in a reduction: encoded pieces) in the message to each other rank
    # The chunks into which each shard or piece is cut, as element ranges (start, end).  Each chunk is encoded and sent
    # separately.
    chunks: tuple[tuple[int, int], ...]
    crosses: bool  # whether ranks on several nodes take part
    keeps: Keeps = "nothing"
    # The planes in which each shard is sent: once with blocks along rows, once with blocks along columns, or both.
    planes: tuple[Plane, ...] = ("rows",)
    ring: bool = False  # whether a rank sends all its messages to the next rank of the axis
    # Distance between the shards (or pieces) of two ranks that are neighbours along the axis, counted in shards (or
    # pieces).
    stride: int = 1

    @property
    def numel(self) -> int:
        """Number of elements of one shard or, in a reduction, of one of the pieces into which a shard is cut."""
        return self.chunks[-1][1]

    @property
    def elements(self) -> int:
        """Number of elements that a rank sends to each other rank along the axis: ``frames`` times ``numel``."""
        return self.frames * self.numel

    @functools.cached_property
    def frame_bytes(self) -> tuple[int, ...]:
        """The bytes of each chunk after encoding.

        A shard (in a reduction: a piece of a shard) is cut into chunks.  A shard of weights may be encoded twice: once
        with the codec's blocks (elements that share a scale) along the rows of matrices, and once with blocks along
        columns.  The bytes of both encodings are then added.
        """
        return tuple(len(self.planes) * self.codec.frame_bytes(end - start) for start, end in self.chunks)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of the message that a rank sends to each other rank, for each chunk.

        Each shard (in a reduction: each piece of a shard) is cut into chunks, and each chunk has a message of its own.
        This message contains the same chunk of all ``frames`` shards or pieces.
        """
        return tuple(self.frames * nbytes for nbytes in self.frame_bytes)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes that one rank sends to each other rank in this hop, in the messages of all chunks together."""
        return sum(self.sizes)

    def sends_elements(self, dtype: str | None) -> bool:
        """Returns whether the hop's messages consist of nothing but elements of the type ``dtype``, such as ``bf16``.

        Such messages have no scales and no padding, so data of this type can be sent without encoding.  ``dtype`` is
        None for a type that no codec sends; the result is then False.
        """
        codec = self.codec
        same = isinstance(codec, Raw) and codec.dtype == dtype
        return same and self.frame_bytes == tuple(codec.code_bytes(end - start) for start, end in self.chunks)


def gather_hops(policy: Policy, topology: Topology, shard: int, sends: Sends = "weights") -> tuple[Hop, ...]:
    """Returns the hops of the all-gather of one unit's weights, of which each rank holds ``shard`` elements.

    With hpZ, small groups of ranks (such as the ranks of a node) share a copy of all weights, and the gather has two
    parts.  In the first part, each rank receives its share of the copy from ranks of other groups.  In the second part,
    it receives the rest of the copy from the ranks of its own group.  With ``sends='copy'``, the gather has only the
    second part.  Without hpZ, the gather has a single part.

    An axis of one rank gives no hop, since a rank need not send itself a message.  There is one exception: if all axes
    of a part have one rank, the part is a single hop, in which the rank copies its message to itself.

    Args:
        policy: the policy for this unit (:meth:`Policy.for_unit`).  If the policy has a user's own gather, the returned
            tuple is empty.
        topology: nodes and ranks.
        shard: the number of elements of a rank's shard.
        sends: what the first hop sends (:data:`Sends`), such as ``weights``, or ``differences`` between the weights and
            hpZ's copy.  ``differences`` means ``weights`` if the policy sends no differences, and ``copy`` means
            ``weights`` if the policy has no hpZ.
    """
    axes, outside = policy.gather_axes(topology)
    hops, frames = list[Hop](), 1
    before, after = _planes(policy, sends)

    def add(
        part: Sequence[Axis], codec: Codec, source: Source, keeps: Keeps, planes: tuple[Plane, ...]
    ) -> None:
        nonlocal frames
        sending = [axis for axis in part if axis.size > 1] or part[:1]
        for number, axis in enumerate(sending, 1):
            hop = Hop(
                kind="all_gather",
                axis=axis,
                codec=codec,
                source=source if number == 1 else "received",
                frames=frames,
                chunks=((0, shard),),
                crosses=topology.crosses(axis),
                keeps=keeps if number == len(sending) else "nothing",
                planes=planes,
                ring=policy.gather == "flat",
                stride=axis.stride,
            )
            hops.append(hop)
            frames *= axis.size

    if sends == "differences" and policy.differences is not None:
        add(axes[:outside], policy.differences, "difference", "sum", before)
    elif outside:
        add(axes[:outside], policy.weights, "master", "nothing" if sends == "rows" else "copy", before)
    spared = len(hops) if sends == "copy" else 0
    if outside and (sends == "copy" or policy.sends_copy):
        add(axes[outside:], policy.copy_codec, "copy", "nothing", after)
    else:
        add(axes[outside:], policy.weights, "received" if outside else "master", "nothing", after)
    return tuple(hops[spared:])


def _planes(policy: Policy, sends: Sends) -> tuple[tuple[Plane, ...], tuple[Plane, ...]]:
    """Returns in which planes a gather sends the weights: (planes of its first part, planes of its second part).

    A plane of a weight matrix is the matrix quantised in blocks along its rows (``rows``), or along its columns
    (``columns``).  The first part of a gather consists of the hops that bring hpZ's copy of the weights, and the second
    part of the hops between the ranks that share this copy.  Without hpZ, all hops belong to the second part.

    - With ``planes=1``, both parts send rows.
    - With ``planes=2``, both parts send rows and columns.
    - With ``planes='phase'`` and no hpZ, all hops send columns if ``sends`` is ``columns``, and otherwise rows.
    - With ``planes='phase'`` and hpZ, the copy holds columns, for the backward pass.  If ``sends`` is ``columns`` or
      ``copy``, both parts send columns.  If ``sends`` is ``rows``, both parts send rows.  If ``sends`` is ``weights``,
      the first part sends columns for the copy and rows for the forward pass, and the second part sends rows.
    """
    if policy.planes != "phase":
        return (_BOTH[: policy.planes],) * 2
    hpz = policy.secondary != 0
    if sends == "columns" or (sends == "copy" and hpz):
        return ("columns",), ("columns",)
    return _BOTH if hpz and sends != "rows" else ("rows",), ("rows",)


def in_phase(policy: Policy, phase: str, sends: Sends) -> Sends:
    """Returns what a gather sends in a pass of this ``phase``: ``forward``, ``backward`` or ``evaluate``.

    ``sends`` is what the gather sends if all passes compute with the same quantised weights.  With ``planes`` 1 or 2,
    this is so, and the result is ``sends``.  With ``planes='phase'``, forward passes and evaluations compute with
    weights quantised in blocks along rows, and backward passes with weights quantised in blocks along columns.  The
    result is then:

    ========  ================  ===================
    phase     ``sends='copy'``  any other ``sends``
    ========  ================  ===================
    forward   rows              weights
    backward  copy              columns
    evaluate  rows              rows
    ========  ================  ===================

    With hpZ, a gather of ``weights`` brings rows and columns, and hpZ's copy keeps the columns for the backward pass.
    Without hpZ, a gather of ``weights`` brings rows.
    """
    if policy.planes != "phase":
        return sends
    if phase == "backward":
        return "copy" if sends == "copy" else "columns"
    return "weights" if phase == "forward" and sends != "copy" else "rows"


def casts_alone(hops: Sequence[Hop], dtype: str) -> bool:
    """Returns whether a gather with these ``hops`` sends nothing, and only casts the masters to the type ``dtype``.

    Masters are the rank's fp32 shard, and ``dtype`` is the type of the gathered weights.  The result is True if three
    conditions hold: the rank holds all of the unit's weights, the policy has no hpZ, and the codec of the weights
    leaves elements of the type ``dtype`` unchanged.
    """
    hop = hops[-1]
    return hop.source == "master" and hop.axis.size == 1 and hop.sends_elements(dtype)


def arrives_decoded(hops: Sequence[Hop], dtype: str) -> bool:
    """Returns whether the messages of a gather with these ``hops`` are the gathered weights, without any decoding.

    ``dtype`` is the type of the gathered weights.  The result is True if the gather has a single hop, which sends
    elements of this type to other ranks.  If the transport allows it, such messages can be received directly into the
    memory of the gathered weights.
    """
    return len(hops) == 1 and hops[0].sends_elements(dtype) and not casts_alone(hops, dtype)


def forwards_in_place(hops: Sequence[Hop]) -> bool:
    """Returns whether the second hop of a gather only forwards the messages that the first hop receives.

    If so, the first hop can receive directly into the buffer whose content the second hop sends.  Returns False if
    there is only one hop, or if the first or the second hop is along an axis of one rank.
    """
    return len(hops) > 1 and hops[1].source == "received" and hops[0].axis.size > 1 < hops[1].axis.size


def copy_bytes(policy: Policy, topology: Topology, shard: int, kept: Codec | None = None) -> int:
    """Returns the bytes of hpZ's copy of one unit's weights on one rank; 0 without hpZ.

    ``policy`` is the policy for this unit, and ``shard`` is the number of elements of a rank's shard of the unit.
    ``kept`` is the codec in which the copy is kept, by default ``policy.copy_codec``.
    """
    if policy.secondary == 0:
        return 0
    first = gather_hops(policy, topology, shard, "copy")[0]
    return first.frames * (kept or first.codec).frame_bytes(shard) if first.source == "copy" else 0


def reduction_hops(policy: Policy, topology: Topology, piece: int, grain: int) -> tuple[Hop, ...]:
    """Returns the hops of the gradient reduction of one unit, which brings each rank the mean gradient of its shard.

    A state group is a group of ranks that share one copy of all sharded states.  With several groups, each shard is
    held once in every group, and is cut into as many pieces as there are groups.  The first hops add up gradients:
    afterwards each rank has the mean of one piece of its shard.  The last hops gather the other pieces from the other
    groups.  With a single group, the piece is the whole shard, and no hops gather pieces.

    With local steps, groups train apart from one another, so the mean is taken only over the ranks of one group.

    ``piece`` is the number of elements of a piece.  A piece may be cut into chunks, which are sent separately; each
    chunk starts on a multiple of ``grain`` elements.  If the mean is over one rank only, the result is an empty tuple.
    """
    group, sums = policy.group_ranks(topology), policy.reduce_axes(topology)
    if policy.local_steps is None:
        return _reduction(policy, topology, piece, grain, sums=sums, ranks=topology.world)
    inside = tuple((axis, codec) for axis, codec in sums if axis.stride < group)
    return _reduction(policy, topology, piece * (topology.world // group), grain, sums=inside, ranks=group)


def outer_hops(policy: Policy, topology: Topology, piece: int, grain: int) -> tuple[Hop, ...]:
    """Returns the hops of an outer step, in which state groups average the changes of one unit's weights.

    A state group is a group of ranks that share one copy of all sharded states.  With local steps, each group trains by
    itself between two outer steps.  An outer step averages, over the groups, the change of the masters (fp32 shards)
    since the last outer step.

    A shard is cut into as many pieces as there are groups, and a piece has ``piece`` elements.  The first hops add up
    the changes: afterwards each rank has the mean change of one piece of its shard.  The last hops gather the other
    pieces from the other groups.  A piece may be cut into chunks, which are sent separately; each chunk starts on a
    multiple of ``grain`` elements.  Without local steps, the result is an empty tuple.
    """
    if policy.local_steps is None:
        return ()
    group = policy.group_ranks(topology)
    between = tuple((axis, codec) for axis, codec in policy.reduce_axes(topology) if axis.stride >= group)
    return _reduction(policy, topology, piece, grain, sums=between, ranks=topology.world // group, outer=True)


def _reduction(
    policy: Policy,
    topology: Topology,
    piece: int,
    grain: int,
    *,
    sums: Sequence[tuple[Axis, Codec]],
    ranks: int,
    outer: bool = False,
) -> tuple[Hop, ...]:
    """Returns the hops that compute a mean over ``ranks`` ranks and bring each rank the mean of its shard.

    The same shard may be held by several ranks.  The first hops add up values: afterwards each of these ranks has the
    mean of one piece of the shard.  The last hops gather the other pieces.  If each shard is held by one rank, a piece
    is a whole shard, and no hops gather pieces.

    Args:
        policy: the policy for this unit.
        topology: nodes and ranks.
        piece: the number of elements of a piece.
        grain: a number of elements.  A piece may be cut into chunks, which are sent separately; each chunk starts on a
            multiple of this number.
        sums: (axis, codec) of each hop that adds up values.
        ranks: the number of ranks over which the mean is taken.
        outer: False for a reduction, which averages the gradients of a whole unit.  True for the outer step of local
            steps, which averages, over one shard, the change of the fp32 masters since the last outer step.
    """
    group = policy.group_ranks(topology)
    kind: Kind = "shift" if policy.reduce == "ring" else "all_to_all"
    chunks = chunked(piece, policy.chunks, grain)

    def hop(axis: Axis, codec: Codec, source: Source, frames: int, keeps: Keeps = "nothing") -> Hop:
        gathers = source in ("mean", "received")
        # A unit is cut into pieces, numbered in order: rank ``k * group + i`` has piece ``i * (world / group) + k``.
        inside = axis.stride < group
        return Hop(
            kind="all_gather" if gathers else kind,
            axis=axis,
            codec=codec,
            source=source,
            frames=frames,
            chunks=((0, piece),) if gathers else chunks,
            crosses=topology.crosses(axis),
            keeps=keeps,
            ring=kind == "shift" and not gathers,
            stride=axis.stride * (ranks // group) if inside else axis.stride // group,
        )

    hops, frames = list[Hop](), ranks
    # With local steps, ``hops="last"`` of feedback means the last hop of the outer step.
    last = len(sums) if outer or policy.local_steps is None else 0
    for number, (axis, codec) in enumerate(sums, 1):
        frames //= axis.size
        carries = policy.feedback is not None and (policy.feedback.hops == "all" or number == last)
        source: Source = "gradient" if number == 1 else "sum"
        hops.append(hop(axis, codec, source, frames, "errors" if carries else "nothing"))
    gathers, codec = policy.replica_axes(topology)
    for axis in gathers if outer or policy.local_steps is None else ():
        hops.append(hop(axis, codec, "mean" if frames == 1 else "received", frames))
        frames *= axis.size
    return tuple(hops)


def in_turns(hops: int, chunks: int) -> list[list[tuple[int, int]]]:
    """Returns the order in which a gradient reduction posts the messages of its hops and chunks.

    A hop is an exchange of messages along one axis of ranks, and the reduction has ``hops`` hops.  The data of the
    reduction is cut into ``chunks`` chunks, and every chunk is sent in every hop, in the order of the hops.

    The result is a list of turns.  A turn is the list of messages that are posted at one time, each as (hop, chunk);
    hops and chunks are counted from 0.  The first turn is posted when the reduction starts, and each later turn by a
    call of :meth:`impl.plan.reduction_queue.Reducing.post_next_hop`.  With 2 hops and 3 chunks:
    [[(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)], [(1, 2)]].

    As soon as chunk c + 1 has been posted in a hop, chunk c is posted in the next hop.  Thus the links of all hops are
    in use while most of the gradient is still to be encoded.
    """
    turns = [
        [(hop, turn - hop) for hop in range(hops) if 0 <= turn - hop < chunks]
        for turn in range(chunks + hops - 1)
    ]
    return [list(itertools.chain(*turns[:chunks])), *turns[chunks:]]
