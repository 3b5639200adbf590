"""All-gathers encoded shards hop by hop: qwZ's and hpZ's gathers (paper sections 3.1 and 3.2).

A shard is encoded once, in :mod:`impl.unit.master_shard`; every hop forwards the received frames unchanged,
so all ranks decode the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impl.codecs.codec import Codec, Raw
from impl.codecs.reference import DTYPES
from impl.comm.ledger import Tag
from impl.comm.transfer import Steps, finish
from impl.comm.wire import Exchange, Wire
from impl.plan.topology import Axis


def gather_frames(
    wire: Wire,
    axes: Sequence[Axis],
    write: Callable[[Tensor], None],
    nbytes: int,
    tag: Tag,
    *,
    ring: bool = False,
    into: Tensor | None = None,
) -> Steps[Exchange]:
    """Forward frames along ``axes``, one hop after the other.

    Args:
        wire: what sends.
        axes: at least one.
        write: fills the first hop's message, (nbytes,) uint8.
        nbytes: size of that message.
        tag: for the ledger.
        ring: the hop is the library's ring over the whole world.
        into: (world * nbytes,) uint8 where all frames are to arrive, which only a single hop uses; or none.

    Returns:
        The last exchange, received but not closed: :func:`gathered` gives its frames.
    """
    held: Exchange | None = None
    hops = sending(axes)
    for axis in hops:
        exchange = wire.all_gather(axis, nbytes, tag, ring=ring, into=into if len(hops) == 1 else None)
        if held is None:
            write(exchange.send)
        else:
            received = held.wait()
            exchange.send.view(received.shape).copy_(received)
            held.close()
        exchange.post()
        yield axis is hops[-1] and wire.mesh.topology.crosses(axis)
        exchange.wait()
        nbytes *= axis.size
        held = exchange
    assert held is not None  # noqa: S101  # there is an axis
    return held


def sending(axes: Sequence[Axis]) -> Sequence[Axis]:
    """The axes along which something is sent: hops among one rank would only copy; but at least one."""
    return [axis for axis in axes if axis.size > 1] or axes[:1]


def gathered(exchange: Exchange, axes: Sequence[Axis], nbytes: int) -> Tensor:
    """(sizes of ``axes`` from the last to the first..., nbytes) what :func:`gather_frames` brought.

    Args:
        exchange: that it returned.
        axes: that it was given.
        nbytes: of a frame of the first hop's message.
    """
    sizes = [axis.size for axis in reversed(sending(axes))]
    frames = torch.unflatten(exchange.wait(), 1, (*sizes[1:], nbytes))
    return frames.view(*(axis.size for axis in reversed(axes)), nbytes)


def as_frames(codec: Codec, flat: Tensor, shard: int) -> Tensor | None:
    """(bytes,) uint8 view of ``flat`` (n * S,), where its shards are their own frames; else None."""
    same = are_elements(codec, flat.dtype, shard) and flat.is_contiguous()
    return flat.view(torch.uint8) if same else None


def are_elements(codec: Codec, dtype: torch.dtype, shard: int) -> bool:
    """Whether a frame of ``shard`` elements of ``dtype`` is those elements, bit by bit."""
    same = isinstance(codec, Raw) and DTYPES[codec.dtype] == dtype
    return same and codec.frame_bytes(shard) == codec.code_bytes(shard)


def placed(flat: Tensor, axes: Sequence[Axis], shard: int, strides: Sequence[int] | None = None) -> Tensor:
    """View of ``flat`` (n * S,) as (sizes of ``axes`` in this order..., S), by rank digits.

    Args:
        flat: parts of S elements.
        axes: whose digits number the parts.
        shard: S.
        strides: parts from one digit to the next along each axis; the axes' own by default.
    """
    sizes = [axis.size for axis in axes]
    apart_by = [axis.stride for axis in axes] if strides is None else strides
    return flat.as_strided((*sizes, shard), (*(stride * shard for stride in apart_by), 1))


def whole_of(wire: Wire, axes: Sequence[Axis], part: Tensor, tag: Tag) -> Tensor:
    """(ranks, n) fp32: the equally long parts of all ranks along ``axes``, in rank order.

    Args:
        wire: what sends.
        axes: that together number the ranks, the first hop's first.
        part: (n,) fp32, this rank's.
        tag: for the ledger.
    """
    numel, ranks = part.numel(), math.prod(axis.size for axis in axes)
    whole = torch.empty(ranks * numel, device=part.device)
    if not numel:
        return whole.view(ranks, 0)

    def write(frame: Tensor) -> None:
        frame.view(torch.float32).copy_(part)

    exchange = finish(gather_frames(wire, axes, write, part.nbytes, tag))
    placed(whole, axes[::-1], numel).copy_(gathered(exchange, axes, part.nbytes).view(torch.float32))
    exchange.close()
    return whole.view(ranks, numel)


def scattered(wire: Wire, source: int, parts: Sequence[Tensor] | None, numel: int, tag: Tag) -> Tensor:
    """(numel,) fp32 that rank ``source`` has for this rank; the other ranks' messages are zeros.

    Args:
        wire: what sends.
        source: the rank that knows.
        parts: on it, fp32 of at most ``numel`` elements for each rank; elsewhere None.
        numel: of the longest part.
        tag: for the ledger.
    """
    world = wire.mesh.topology.world_axis
    exchange = wire.all_to_all(world, numel * torch.float32.itemsize, tag)
    rows = exchange.send.view(torch.float32).view(world.size, numel).zero_()
    for row, part in zip(rows, parts or (), strict=False):
        row[: part.numel()] = part
    exchange.post()
    mine = exchange.wait()[source].clone().view(torch.float32)
    exchange.close()
    return mine
