"""All-gathers encoded shards hop by hop, as qwZ and hpZ do (paper sections 3.1 and 3.2).

A hop is one exchange along one axis of ranks, such as the ranks of a node.  Each rank encodes its shard once
(:mod:`impl.unit.master_shard`).  In a later hop it forwards the encoded shards (*frames*) that it received in the
previous hop, without decoding them.  Therefore all ranks decode the same bytes.  If ranks keep hpZ's secondary copy of
the weights, a hop may send this copy instead (:mod:`impl.unit.secondary_shard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impl.comm import exchanges
from impl.comm.exchanges import Exchange
from impl.comm.wire import Wire
from impl.plan.hops import Hop, forwards_in_place
from impl.plan.traffic import Tag
from impl.policy.topology import Axis


def forward(_: Hop, message: Tensor, received: Tensor) -> None:
    """Copy what the previous hop has ``received`` into the ``message`` (bytes,) uint8 of the next hop.

    This is the usual ``write`` of a :class:`FrameGather`: frames (encoded shards) are sent on as they are.
    """
    message.view(received.shape).copy_(received)


class FrameGather:
    """Runs the ``hops`` (exchanges) of a gather, one after the other; used for one gather at a time.

    What is gathered are frames: the encoded shards of the ranks.

    :meth:`start` posts the first hop, and :meth:`finish` runs the remaining hops.  ``left`` is the number of hops that
    are not posted yet.  With ``post=False``, :meth:`start` and :meth:`post_next_hop` only write the hop's message.
    The function :func:`post_together` then posts the written messages of several gathers at once.

    Args:
        wire: sends the messages.
        hops: the hops, in the order in which they are posted.
        write: a function that writes the message of each hop after the first.  It is called with the hop, the message
            (bytes,) uint8, and what the previous hop has received, (ranks along the previous hop's axis, bytes) uint8.
            There is one exception: the first hop may receive its data directly into the second hop's message.  Then
            this message is complete, and the function is not called for the second hop.
        keep: a function that stores what a hop has received, for example as hpZ's copy of the weights.  It is called
            with the hop and the received bytes, before the next hop is posted.  It is called only if the hop's field
            ``keeps`` says that something is to be stored, and never for the last hop.
    """

    def __init__(
        self,
        wire: Wire,
        hops: Sequence[Hop],
        write: Callable[[Hop, Tensor, Tensor], None] = forward,
        keep: Callable[[Hop, Tensor], None] | None = None,
    ) -> None:
        self.hops, self.left = hops, len(hops)
        self._wire, self._write, self._keep = wire, write, keep
        self._tag = Tag("step", "state")
        self._exchange: Exchange  # the hop under way, from start() to close()
        # The exchange of the second hop, while the first hop is under way and is received into this exchange's message.
        self._opened: Exchange | None = None
        # Whether the first hop is received directly into the message of the second hop, which only forwards the frames.
        self._forwards = wire.streams and forwards_in_place(hops)

    def start(
        self,
        tag: Tag,
        first: Callable[[Hop, Tensor], None],
        into: Tensor | None = None,
        *,
        post: bool = True,
    ) -> None:
        """Write the first hop's message by calling ``first(hop, message)``, and post the first hop.

        Args:
            tag: the phase, purpose and unit under which the ledger books the messages of all hops.
            first: a function that writes the first hop's message (bytes,) uint8.
            into: memory (ranks * bytes,) uint8 for the messages of all ranks.  It is used if the gather has a single
                hop and the wire's transport can receive into such memory.  Otherwise it is ignored.
            post: whether to post the message.  If False, :func:`post_together` must be called to post it.
        """
        self._tag, self.left, hop = tag, len(self.hops) - 1, self.hops[0]
        to = None if self.left else into
        self._opened = self._open(self.hops[1]) if self._forwards else None
        if self._opened is not None:
            to = self._opened.send
        exchange = self._exchange = self._wire.all_gather(
            hop.axis, hop.nbytes, tag, ring=hop.ring, into=to, in_line=True
        )
        first(hop, exchange.send)
        if post:
            exchange.post()

    def post_next_hop(self, *, post: bool = True) -> None:
        """Wait for the hop (exchange) under way, and write the next hop's message; with ``post=True``, also post it."""
        before, last, hop = self._exchange, self.hops[-self.left - 1], self.hops[-self.left]
        received = before.wait()
        if self._keep is not None and last.keeps != "nothing":
            self._keep(last, received)
        if (exchange := self._opened) is None:
            exchange = self._open(hop)
            self._write(hop, exchange.send, received)
        self._opened = None
        before.close()
        self._exchange = exchange
        if post:
            exchange.post()
        self.left -= 1

    def _open(self, hop: Hop) -> Exchange:
        return self._wire.all_gather(hop.axis, hop.nbytes, self._tag, ring=hop.ring, in_line=True)

    def finish(self) -> Tensor:
        """Run all hops (exchanges) that are left, and return what the last hop has received.

        The result is (ranks along the last hop's axis, bytes) uint8, with a row for each of these ranks.  It is valid
        until :meth:`close`.

        A row contains the frames of all ranks along the earlier axes; the rank along the first axis varies fastest.
        For example, if the first hop is inside nodes and the second hop is between nodes, row i contains the frames of
        all ranks of node i, in rank order.
        """
        while self.left:
            self.post_next_hop()
        return self._exchange.wait()

    def close(self) -> None:
        """Give back the memory of the last hop's messages; the result of :meth:`finish` is then no longer valid."""
        self._exchange.close()
        del self._exchange


def post_together(gathers: Sequence[FrameGather]) -> None:
    """Post the messages that several ``gathers`` have written with ``post=False``.

    With NCCL, one call posts all consecutive messages along the same axis.
    """
    exchanges.post_together([gather._exchange for gather in gathers])  # noqa: SLF001  # of this module's class


def by_axes(flat: Tensor, axes: Sequence[Axis], shard: int, strides: Sequence[int] | None = None) -> Tensor:
    """Return a view of ``flat`` that has a dimension for each of ``axes``, and a last dimension for a shard's elements.

    ``flat`` has the shards of all ranks, one after the other, each of ``shard`` elements.  The view has the shape (size
    of each of ``axes``..., ``shard``).  For two axes, ``view[i, j]`` is the shard of the rank with index i along the
    first axis, and index j along the second axis.

    ``strides`` has a number for each axis.  It is the distance in ``flat``, in shards, from the shard of a rank to the
    shard of the next rank along this axis.  By default it is ``axis.stride``.
    """
    sizes = [axis.size for axis in axes]
    apart_by = [axis.stride for axis in axes] if strides is None else strides
    return flat.as_strided((*sizes, shard), (*(stride * shard for stride in apart_by), 1))


def gather_whole(wire: Wire, axes: Sequence[Axis], part: Tensor, tag: Tag) -> Tensor:
    """Gather every rank's ``part`` (n,) fp32 unencoded along ``axes``, with one exchange for each axis.

    The messages are booked under ``tag``.

    Returns the parts of all ranks, (ranks, n) fp32 in rank order.
    """
    numel, ranks = part.numel(), math.prod(axis.size for axis in axes)
    whole = torch.empty(ranks * numel, device=part.device)
    if numel:
        rows, under_way = part, list[Exchange]()
        for axis in [axis for axis in axes if axis.size > 1]:
            exchange = wire.all_gather(axis, rows.nbytes, tag)
            exchange.send.view(torch.float32).view(rows.shape).copy_(rows)
            exchange.post()
            rows = exchange.wait().view(torch.float32)
            under_way.append(exchange)
        target = by_axes(whole, axes[::-1], numel)
        target.copy_(rows.view(target.shape))
        for exchange in under_way:
            exchange.close()
    return whole.view(ranks, numel)


def scatter(wire: Wire, source: int, parts: Sequence[Tensor] | None, numel: int, tag: Tag) -> Tensor:
    """Send a different tensor from rank ``source`` to each rank, and return the tensor for this rank, (numel,) fp32.

    On ``source``, ``parts`` has one tensor of at most ``numel`` elements for each rank; shorter tensors are padded with
    zeros.  On the other ranks ``parts`` is None.  All ranks must call this: the function runs one all-to-all, in which
    the other ranks send zeros.  The ledger books the messages under ``tag``.
    """
    world = wire.mesh.topology.world_axis
    exchange = wire.all_to_all(world, numel * torch.float32.itemsize, tag)
    rows = exchange.send.view(torch.float32).view(world.size, numel).zero_()
    for row, values in zip(rows, parts or (), strict=False):
        row[: values.numel()] = values
    exchange.post()
    part = exchange.wait()[source].clone().view(torch.float32)
    exchange.close()
    return part
