"""Reduces and scatters gradients hop by hop, with any codec: qgZ's two-hop all-to-all (paper section 3.3).

A gradient seen as ``(axis 0, axis 1, ..., shard)`` is transposed while it is encoded, sent along axis 0,
summed in fp32 in ascending source order, encoded again for axis 1, and so on; the result is the mean.
Beside it a ring, and the gather of the mean between groups that hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Codec
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key, Noise, apart
from impl.comm.all_gather import are_elements, as_frames, gather_frames, gathered, placed
from impl.comm.error_feedback import Errors
from impl.comm.ledger import Tag
from impl.comm.reduction_observer import Hop
from impl.comm.transfer import Steps
from impl.comm.wire import Exchange, Wire
from impl.plan.policy import Reduce
from impl.plan.topology import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a gradient is reduced, beside its values.

    Attributes:
        hops: axes with their codecs, first hop first; together they number the world; none for one
            rank.
        strides: along each hop, pieces from one rank's to its neighbour's; the axes' own by default.
        chunks: (start, end) of the chunks of a piece, whose hops overlap; one by default.
        key: of stochastic codecs, with this rank as the source; the hop is filled in.
        errors: of the gradient codecs, for error feedback.
        stays: whether the gradient stays as it is until the end, so that raw frames may be sent from where
            they lie.
        opened: the first hop's exchange, in whose message the gradient lies already (:func:`opened`).
        out: (piece,) fp32 where the mean is written; a fresh tensor by default.
        goes_on: whether the mean is sent on, to other groups.
    """

    wire: Wire
    hops: Sequence[tuple[Axis, Codec]]
    tag: Tag
    strides: Sequence[int] | None = None
    chunks: Sequence[tuple[int, int]] | None = None
    key: Key | None = None
    errors: Errors | None = None
    stays: bool = False
    opened: Exchange | None = None
    out: Tensor | None = None
    goes_on: bool = False

    @property
    def spacing(self) -> Sequence[int]:
        """Along each hop, pieces from one rank's to its neighbour's."""
        return [axis.stride for axis, _ in self.hops] if self.strides is None else self.strides

    def noise(self, hop: int, shard: int, start: int) -> Noise | None:
        """Random bits of what ``hop`` encodes from element ``start`` of each shard on."""
        if self.key is None or not self.hops[hop][1].stochastic:
            return None
        rank, strides = self.wire.mesh.rank, [stride * apart(shard) for stride in self.spacing]
        done = zip(self.hops[:hop], strides[:hop], strict=True)
        before = sum(axis.digit(rank) * stride for (axis, _), stride in done)
        return replace(self.key, hop=hop).noise(before + start, tuple(strides[hop:]))

    def carried(self, hop: int, start: int, end: int) -> Carried | None:
        """Error feedback of elements [start, end) of each shard."""
        return None if self.errors is None else self.errors.carried(hop, start, end)

    def tell(self, hop: Hop, values: Tensor | None, frames: Tensor | None) -> None:
        """Tell an observer, if there are values for one (:func:`_observed`), what became which frames."""
        if values is not None and self.wire.observer is not None:
            self.wire.observer.encoded(self.tag.unit, hop, values, frames)


def opened(how: Reduction, piece: int, dtype: torch.dtype) -> Exchange | None:
    """The first hop's exchange, if the gradient may be collected in its message, in the order of the unit.

    So it may where frames are the elements themselves, and the ranks of the hop either get whole rows of
    it, or see each other's messages as a whole and pick their part.

    Args:
        how: of :func:`reduce_gradients`.
        piece: elements that each rank ends with.
        dtype: of the gradient.

    Returns:
        An exchange whose ``send`` is (world * piece,) elements; None where frames must be encoded.
    """
    if not how.hops or len(how.chunks or ()) > 1 or how.errors is not None or how.strides is not None:
        return None
    (axis, codec), *rest = how.hops
    if not are_elements(codec, dtype, piece):
        return None
    if rest and not how.wire.shares_memory(axis):
        return None
    nbytes = math.prod(other.size for other, _ in rest) * codec.frame_bytes(piece)
    return how.wire.all_to_all(axis, nbytes, how.tag)


def _picked(how: Reduction, exchange: Exchange, sizes: Sequence[int], frame: int) -> Tensor:
    """(source, sizes of the later hops..., F): this rank's part of gradients in the order of the unit."""
    rows = exchange.whole()  # (source, world * F)
    axes = [axis for axis, _ in how.hops]
    first = axes[0].digit(how.wire.mesh.rank) * axes[0].stride * frame
    strides = [axis.stride * frame for axis in axes[1:]]
    shape = (len(rows), *sizes, frame)
    return rows.as_strided(shape, (rows.stride(0), *strides, 1), rows.storage_offset() + first)


def reduce_gradients(how: Reduction, gradient: Tensor) -> Steps[Tensor]:
    """Average ``gradient`` over all ranks; each rank gets its shard.

    A chunk goes on to its next hop as soon as the one after it was posted on this one, so that the link of
    the last hop has something to carry while most of the gradient is still to be encoded.  All ranks post
    in this one order.  ``gradient`` may be overwritten once the generator stops for the first time: then the
    first hop of all chunks is posted.

    Args:
        how: along which hops, with which codecs.
        gradient: (world * S,) of any floating-point type.

    Returns:
        (S,) fp32 mean of this rank's shard.
    """
    axes = [axis for axis, _ in how.hops]
    sizes = [axis.size for axis in axes]
    world = math.prod(sizes)
    shard = gradient.numel() // world
    chunks = how.chunks or ((0, shard),)
    slices = placed(gradient, axes, shard, how.spacing)  # (axis 0, axis 1, ..., S)
    under_way: list[tuple[Codec, Exchange]] = []  # of the last hop, chunk by chunk
    hops = len(how.hops)
    for turn in range(len(chunks) + hops - 1):  # in each, all chunks that can go one hop further do
        for hop, (axis, codec) in enumerate(how.hops):
            index = turn - hop
            if not 0 <= index < len(chunks):
                continue
            start, end = chunks[index]
            rest = sizes[hop + 1 :]  # the axes that are still to come
            frame = codec.frame_bytes(end - start)
            noise, carried = how.noise(hop, shard, start), how.carried(hop, start, end)
            if hop == 0 and how.opened is not None:
                under_way.append((codec, how.opened))
                how.tell(Hop(hop, axis.name, codec), _observed(how, slices[..., start:end], None), None)
                how.opened.post()
                continue
            source = None
            if how.stays and how.strides is None and hops == len(chunks) == 1 and carried is None:
                source = as_frames(codec, gradient, shard)
            exchange = how.wire.all_to_all(axis, math.prod(rest) * frame, how.tag, source=source)
            send = exchange.send.view(axis.size, *rest, frame)
            if hop == 0:
                values = _observed(how, slices[..., start:end], carried)
                if source is None or exchange.send.data_ptr() != source.data_ptr():
                    ops.encode(codec, slices[..., start:end], send, noise=noise, carried=carried)
                under_way.append((codec, exchange))
            else:
                before, received = under_way[index]
                if hop == 1 and how.opened is not None:
                    frames = _picked(how, received, sizes[1:], before.frame_bytes(end - start))
                else:
                    frames = _frames(under_way[index], sizes[hop:], end - start)
                values = _observed_sum(how, before, frames, end - start, carried)
                ops.decode_sum_encode(before, codec, frames, send, end - start, noise=noise, carried=carried)
                received.close()
                under_way[index] = codec, exchange
            how.tell(Hop(hop, axis.name, codec), values, send)
            exchange.post()
        done = turn - len(chunks) + 1  # the hop on which the last chunk was posted
        if done >= 0:
            yield done == hops - 1 and not how.goes_on and how.wire.mesh.topology.crosses(axes[done])
    mean = how.out
    if mean is None:
        mean = torch.empty(shard, dtype=torch.float32, device=gradient.device)
    for (start, end), last in zip(chunks, under_way, strict=True):
        ops.decode_sum(last[0], _frames(last, [], end - start), mean[start:end])
        last[1].close()
    return mean.div_(world)


def _observed(how: Reduction, x: Tensor, carried: Carried | None) -> Tensor | None:
    """What is encoded of ``x``, for an observer: with the errors that feedback adds; None without one."""
    if how.wire.observer is None:
        return None
    return x if carried is None else x.float() + carried.error.float()


def _observed_sum(
    how: Reduction, codec: Codec, frames: Tensor, numel: int, carried: Carried | None
) -> Tensor | None:
    """The same of the sum (..., numel) of ``frames`` (sources, ..., F)."""
    if how.wire.observer is None:
        return None
    held = torch.empty((*frames.shape[1:-1], numel), dtype=torch.float32, device=frames.device)
    ops.decode_sum(codec, frames, held)
    return _observed(how, held, carried)


def _frames(received: tuple[Codec, Exchange], rest: Sequence[int], numel: int) -> Tensor:
    """(source, rest..., F) uint8: what an exchange brought."""
    codec, exchange = received
    return torch.unflatten(exchange.wait(), 1, (*rest, codec.frame_bytes(numel)))


def ring_reduce(how: Reduction, gradient: Tensor) -> Steps[Tensor]:
    """The same mean by one ring over all ranks: ``world - 1`` steps, partial sums on the wire.

    Blind to nodes: what a library does without knowing the topology.  A partial sum is encoded again
    at every step, so errors add up ``world - 1`` times (paper section 3.3).

    Args:
        how: one hop over the world.
        gradient: (world * S,) of any floating-point type.
    """
    ((axis, codec),) = how.hops
    size, me = axis.size, axis.digit(how.wire.mesh.rank)
    slices = gradient.view(size, -1).to(
        torch.float32, copy=True
    )  # (rank, S); the caller's buffer is free again
    shard = slices.shape[1]
    partial = slices[(me - 1) % size].clone()
    for step in range(size - 1):
        exchange = how.wire.shift(axis, codec.frame_bytes(shard), how.tag)
        noise = None
        if codec.stochastic and how.key is not None:
            noise = replace(how.key, hop=step).noise((me - 1 - step) % size * apart(shard))
        ops.encode(codec, partial, exchange.send, noise=noise)
        how.tell(Hop(step, axis.name, codec), _observed(how, partial, None), exchange.send)
        exchange.post()
        yield step == size - 2 and how.wire.mesh.topology.crosses(axis)
        ops.decode(codec, exchange.wait()[0], partial)
        exchange.close()
        partial += slices[(me - 2 - step) % size]
    return partial.div_(size)


def reduced(how: Reduction, reduce: Reduce, gradient: Tensor) -> Steps[Tensor]:
    """The mean by the algorithm that a policy names: (S,) fp32 of this rank's shard."""
    if how.wire.observer is not None:
        how.wire.observer.local(how.tag.unit, gradient)
    if not how.hops:  # one rank
        return gradient.to(torch.float32, copy=True)
    return (yield from (ring_reduce if reduce == "ring" else reduce_gradients)(how, gradient))


def replicated(
    wire: Wire,
    axes: Sequence[Axis],
    codec: Codec,
    tag: Tag,
    mean: Tensor,
    *,
    strides: Sequence[int],
    noise: Noise | None = None,
    hop: int = 0,
) -> Steps[Tensor]:
    """Gather the pieces of a shard's mean from the ranks of all groups that hold the shard.

    Every rank decodes what was sent, its own piece too, so that groups stay bit-equal.

    Args:
        wire: what sends.
        axes: between the groups, first hop first.
        codec: in which it travels.
        tag: for the ledger.
        mean: (piece,) fp32 of this rank.
        strides: along each axis, pieces of the shard from one rank's to its neighbour's.
        noise: of a stochastic codec, for this rank's piece.
        hop: number of this hop after those of the reduction, for an observer.

    Returns:
        (S,) fp32 mean of this rank's shard.
    """
    piece, nbytes = mean.numel(), codec.frame_bytes(mean.numel())

    def write(frame: Tensor) -> None:
        ops.encode(codec, mean, frame, noise=noise)
        if wire.observer is not None:
            name = "+".join(axis.name for axis in axes)
            wire.observer.encoded(tag.unit, Hop(hop, name, codec), mean, frame)

    exchange = yield from gather_frames(wire, axes, write, nbytes, tag)
    whole = mean.new_empty(piece * math.prod(axis.size for axis in axes))
    ops.decode(codec, gathered(exchange, axes, nbytes), placed(whole, axes[::-1], piece, strides[::-1]))
    exchange.close()
    return whole
