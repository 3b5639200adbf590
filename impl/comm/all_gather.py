"""All-gathers encoded shards hop by hop, as qwZ and hpZ do (paper sections 3.1 and 3.2).

Each rank encodes its shard once (:mod:`impl.unit.master_shard` does it for weights).  Every further hop forwards
the frames that the previous hop received, without decoding them, so all ranks decode the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.codecs.codec import Codec, Raw
from impl.codecs.reference import DTYPES
from impl.comm.exchanges import Exchange
from impl.comm.wire import Wire
from impl.plan.topology import Axis
from impl.plan.traffic import Tag


class FrameGather:
    """All-gathers frames of ``nbytes`` along ``axes``, one hop after the other; used for one gather at a time.

    :meth:`open` returns the first hop's message, which the caller fills.  :meth:`post` sends it.  :meth:`finish`
    waits for it, then runs the remaining hops.  ``left`` is the number of hops that are not posted yet.
    """

    def __init__(self, wire: Wire, axes: Sequence[Axis], nbytes: int, *, ring: bool = False) -> None:
        self._wire, self._nbytes, self._ring = wire, nbytes, ring
        self._hops = [axis for axis in axes if axis.size > 1] or axes[:1]  # a hop of one rank would only copy
        self.sends = self._hops[0].size > 1  # whether the first hop has other ranks
        self._shape = (*(axis.size for axis in reversed(axes)), nbytes)
        self._tag, self.left = Tag("step", "state"), len(self._hops)
        self._exchange: Exchange  # the hop under way, from open() to close()

    def open(self, tag: Tag, into: Tensor | None = None) -> Tensor:
        """Return the first hop's message, (nbytes,) uint8, to be written before :meth:`post`.

        If the gather has a single hop, all frames may arrive in ``into``, (ranks * nbytes,) uint8; otherwise
        ``into`` is not used.
        """
        self._tag, self.left = tag, len(self._hops)
        to = into if self.left == 1 else None
        self._exchange = self._wire.all_gather(self._hops[0], self._nbytes, tag, ring=self._ring, into=to)
        return self._exchange.send

    def post(self) -> None:
        """Send the first hop's message."""
        self._exchange.post()
        self.left -= 1

    def post_next_hop(self) -> None:
        """Wait for the hop under way, and forward its frames along the next axis."""
        before, hop = self._exchange, len(self._hops) - self.left
        rows = before.wait()
        exchange = self._wire.all_gather(self._hops[hop], rows.numel(), self._tag, ring=self._ring)
        exchange.send.view(rows.shape).copy_(rows)
        before.close()
        self._exchange = exchange
        exchange.post()
        self.left -= 1

    def finish(self) -> Tensor:
        """Finish all hops and return the frames, valid until :meth:`close`.

        Returns uint8 of shape (size of the last axis, ..., size of the first axis, nbytes).
        """
        while self.left:
            self.post_next_hop()
        return self._exchange.wait().view(self._shape)

    def close(self) -> None:
        """Give the last hop's buffers back."""
        self._exchange.close()
        del self._exchange


def are_elements(codec: Codec, dtype: torch.dtype, shard: int) -> bool:
    """Return whether a frame of ``shard`` elements of ``dtype`` is just these elements, bit by bit."""
    same = isinstance(codec, Raw) and DTYPES[codec.dtype] == dtype
    return same and codec.frame_bytes(shard) == codec.code_bytes(shard)


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
        gather = FrameGather(wire, axes, part.nbytes)
        gather.open(tag).view(torch.float32).copy_(part)
        gather.post()
        by_axes(whole, axes[::-1], numel).copy_(gather.finish().view(torch.float32))
        gather.close()
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
