"""All-gathers encoded shards hop by hop: qwZ's and hpZ's gathers (paper sections 3.1 and 3.2).

A shard is encoded once, in :mod:`impl.unit.master_shard`; every hop forwards the received frames unchanged,
so all ranks decode the same bytes.
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
    """All-gathers frames of ``nbytes`` along ``axes``, hop after hop; one at a time is under way.

    :meth:`open` gives the first hop's message, which the caller fills; :meth:`post` sends it; :meth:`finish`
    waits for it, and posts and waits for the hops after it; ``left`` hops are not posted.
    """

    def __init__(self, wire: Wire, axes: Sequence[Axis], nbytes: int, *, ring: bool = False) -> None:
        self._wire, self._nbytes, self._ring = wire, nbytes, ring
        self._hops = [axis for axis in axes if axis.size > 1] or axes[:1]  # others would only copy
        self._shape = (*(axis.size for axis in reversed(axes)), nbytes)
        self._tag, self.left = Tag("step", "state"), len(self._hops)
        self._exchange: Exchange  # from open() to close()

    def open(self, tag: Tag, into: Tensor | None = None) -> Tensor:
        """(nbytes,) uint8, the first hop's message, to be written before :meth:`post`.

        ``into`` (ranks * nbytes,) uint8 receives all frames of a single hop; else it is not used.
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
        """(sizes of all axes from the last to the first..., nbytes) uint8; valid until :meth:`close`."""
        while self.left:
            self.post_next_hop()
        return self._exchange.wait().view(self._shape)

    def close(self) -> None:
        """Give the last hop's buffers back."""
        self._exchange.close()
        del self._exchange


def are_elements(codec: Codec, dtype: torch.dtype, shard: int) -> bool:
    """Whether a frame of ``shard`` elements of ``dtype`` is those elements, bit by bit."""
    same = isinstance(codec, Raw) and DTYPES[codec.dtype] == dtype
    return same and codec.frame_bytes(shard) == codec.code_bytes(shard)


def by_axes(flat: Tensor, axes: Sequence[Axis], shard: int, strides: Sequence[int] | None = None) -> Tensor:
    """View of ``flat`` (n * S,) as (sizes of ``axes`` in this order..., S), by rank digits.

    ``strides`` are the parts between neighbours along each axis; the axes' own by default.
    """
    sizes = [axis.size for axis in axes]
    apart_by = [axis.stride for axis in axes] if strides is None else strides
    return flat.as_strided((*sizes, shard), (*(stride * shard for stride in apart_by), 1))


def gather_whole(wire: Wire, axes: Sequence[Axis], part: Tensor, tag: Tag) -> Tensor:
    """(ranks, n) fp32: the parts (n,) of all ranks along ``axes``, the first hop's first, in rank order."""
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
    """(numel,) fp32 this rank's part from rank ``source``; the other ranks' messages are zeros.

    ``parts`` are one for each rank, of at most ``numel`` elements, on ``source``; elsewhere None.
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
