"""All-gathers encoded shards hop by hop, as qwZ and hpZ do (paper sections 3.1 and 3.2).

Each rank encodes its shard once (:mod:`impl.unit.master_shard` does it for weights).  Every further hop forwards
the frames that the previous hop received, without decoding them, so all ranks decode the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impl.comm.exchanges import Exchange
from impl.comm.wire import Wire
from impl.plan.hops import Hop, forwards_in_place
from impl.plan.traffic import Tag
from impl.policy.topology import Axis


def forward(_: Hop, message: Tensor, received: Tensor) -> None:
    """Copy the frames that the previous hop has ``received`` into the ``message`` of a hop."""
    message.view(received.shape).copy_(received)


class FrameGather:
    """Runs the ``hops`` of a gather, one after the other; used for one gather at a time.

    :meth:`start` posts the first hop, :meth:`finish` runs the remaining ones.  ``left`` is the number of hops that are
    not posted yet.

    Args:
        wire: sends the messages.
        hops: the hops, in the order in which they are posted.
        write: writes a further hop's message, given the hop, the message (bytes,) uint8 and what the hop before has
            received, (ranks along its axis, bytes) uint8.
        keep: is called for each hop that keeps something, before the next hop is opened, with the hop and with what
            the hop has received.
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
        # The second hop, while the first one is under way, which is received in the second hop's message.
        self._opened: Exchange | None = None
        # Whether the first hop is received in the message of the second, which only forwards it.
        self._forwards = wire.streams and forwards_in_place(hops)

    def start(self, tag: Tag, first: Callable[[Hop, Tensor], None], into: Tensor | None = None) -> None:
        """Post the first hop; ``first`` is called with the hop and the message (bytes,) uint8, which it writes.

        If the gather has a single hop, all messages may arrive in ``into``, (ranks * bytes,) uint8; otherwise ``into``
        is not used.
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
        exchange.post()

    def post_next_hop(self) -> None:
        """Wait for the hop under way, and post the next one."""
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
        exchange.post()
        self.left -= 1

    def _open(self, hop: Hop) -> Exchange:
        return self._wire.all_gather(hop.axis, hop.nbytes, self._tag, ring=hop.ring, in_line=True)

    def finish(self) -> Tensor:
        """Finish all hops; returns what the last hop has received, valid until :meth:`close`.

        The result is (ranks along the last axis, bytes) uint8, and each row has the frames of the earlier axes' ranks,
        the first axis' ranks innermost.
        """
        while self.left:
            self.post_next_hop()
        return self._exchange.wait()

    def close(self) -> None:
        """Give the last hop's buffers back."""
        self._exchange.close()
        del self._exchange


def by_axes(flat: Tensor, axes: Sequence[Axis], shard: int, strides: Sequence[int] | None = None) -> Tensor:
    """View ``flat`` (n * S,), n shards of S elements, as (size of each axis..., S), in the order of ``axes``.

    ``strides`` are the distances, in shards, between neighbours along each axis; by default those of the axes.
    """
    sizes = [axis.size for axis in axes]
    apart_by = [axis.stride for axis in axes] if strides is None else strides
    return flat.as_strided((*sizes, shard), (*(stride * shard for stride in apart_by), 1))


def gather_whole(wire: Wire, axes: Sequence[Axis], part: Tensor, tag: Tag) -> Tensor:
    """Gather the parts (n,) fp32 of all ranks along ``axes``, hop by hop; returns (ranks, n) in rank order."""
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
    """Send each rank its part from rank ``source``; returns this rank's part (numel,) fp32.

    ``parts`` has, on ``source``, one tensor of at most ``numel`` elements for each rank; on other ranks it is
    None.  This is an all-to-all in which the other ranks send zeros.
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
