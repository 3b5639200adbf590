"""All-gather of weights and reduction of gradients, hop by hop, with any codec.

A collective is a generator that stops after each posted message, so that the caller can compute
while it travels; :class:`Transfer` drives it.  What is sent and in which order follows from the
axes alone.

[Note: deferred last hop]
After a message of an earlier hop the caller comes back soon, for the next hop cannot be posted before this
one has arrived and the link would idle.  After the last hop nothing is left to post: if it travels between
nodes, on the slowest link, its wait is deferred until the values are needed (:meth:`Transfer.proceed`);
inside a node it is over by the time that anybody asks.

Gather (paper section 3.1 and 3.2): a shard is encoded once; every hop forwards the received
frames unchanged, so all ranks decode the same bytes.  Reduce (section 3.3): a gradient seen as
``(axis 0, axis 1, ..., shard)`` is transposed while it is encoded, sent along axis 0, summed in
fp32 in ascending source order, encoded again for axis 1, and so on; the result is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Codec, Raw
from impl.codecs.reference import DTYPES, Carried
from impl.codecs.rounding_noise import Key, Noise, apart
from impl.comm.error_feedback import Errors
from impl.comm.wire import Exchange, Tag, Wire
from impl.errors import ZeroError
from impl.plan.policy import Reduce
from impl.plan.topology import Axis
from impl.transport.zero_copy import Lease

T = TypeVar("T")


# Yields after each message whether it is the last, and travels between nodes ([Note: deferred last hop]).
Steps = Generator[bool, None, T]


def finish(steps: Steps[T]) -> T:
    """Carry a collective to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Transfer:
    """A collective under way: starts at once, goes on when told.

    All ranks must call :meth:`proceed`, :meth:`advance` and :meth:`wait` in the same order: each may post
    the next hop's message, and messages of one axis match by order.

    Attributes:
        failed: whether it ended in an error, or was interrupted: then it is never carried on.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self._steps: Steps[None] | None = steps
        self.failed = self._deferred = False
        self.advance()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._steps is None

    def advance(self) -> None:
        """Wait for the message under way and post the next one, if there is one.

        Raises:
            ZeroError: if it failed before.
        """
        if self.failed:
            raise ZeroError(
                "a gather or reduction that was interrupted cannot be finished: its values are lost on this "
                "rank; call drop_gradients(), finish_backward() and zero_grad(), and run the step anew"
            )
        if self._steps is not None:
            try:
                self._deferred = next(self._steps)
            except StopIteration:
                self._steps = None
            except BaseException:  # a generator that raised would look as if it had ended
                self.failed = True
                raise

    def proceed(self) -> None:
        """:meth:`advance`, unless it would only wait for the slowest link ([Note: deferred last hop])."""
        if not self._deferred:
            self.advance()

    def wait(self) -> None:
        """Carry the collective to its end."""
        while self._steps is not None:
            self.advance()


def gather_frames(
    wire: Wire,
    axes: Sequence[Axis],
    write: Callable[[Tensor], None],
    nbytes: int,
    tag: Tag,
    *,
    ring: bool = False,
    destination: Tensor | Lease | None = None,
) -> Steps[Exchange]:
    """Forward frames along ``axes``, one hop after the other.

    Args:
        wire: what sends.
        axes: at least one.
        write: fills the first hop's message, (nbytes,) uint8.
        nbytes: size of that message.
        tag: for the ledger.
        ring: the hop is the library's ring over the whole world.
        destination: where all frames are to arrive: a buffer, (world * nbytes,) uint8, if there is one hop; a
            lease on shared memory, in which they stay after the exchange, if the ranks of the last hop share
            it, and there are one or two hops, of which the first's messages arrive there; or none.

    Returns:
        The last exchange, received but not closed: :func:`gathered` gives its frames.
    """
    held: Exchange | None = None
    hops = sending(axes)
    lease = destination if isinstance(destination, Lease) else None
    into = destination if isinstance(destination, Tensor) and len(hops) == 1 else None
    for axis in hops:
        exchange = wire.all_gather(axis, nbytes, tag, ring=ring, into=into, lease=lease)
        if held is None:
            write(exchange.send)
        elif lease is None:
            received = held.wait()
            exchange.send.view(received.shape).copy_(received)
        if held is not None:
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
                how.opened.post()
                continue
            source = None
            if how.stays and how.strides is None and hops == len(chunks) == 1 and carried is None:
                source = as_frames(codec, gradient, shard)
            exchange = how.wire.all_to_all(axis, math.prod(rest) * frame, how.tag, source=source)
            send = exchange.send.view(axis.size, *rest, frame)
            if hop == 0:
                if source is None or exchange.send.data_ptr() != source.data_ptr():
                    ops.encode(codec, slices[..., start:end], send, noise=noise, carried=carried)
                under_way.append((codec, exchange))
            else:
                before, received = under_way[index]
                if hop == 1 and how.opened is not None:
                    frames = _picked(how, received, sizes[1:], before.frame_bytes(end - start))
                else:
                    frames = _frames(under_way[index], sizes[hop:], end - start)
                ops.decode_sum_encode(before, codec, frames, send, end - start, noise=noise, carried=carried)
                received.close()
                under_way[index] = codec, exchange
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
        exchange.post()
        yield step == size - 2 and how.wire.mesh.topology.crosses(axis)
        ops.decode(codec, exchange.wait()[0], partial)
        exchange.close()
        partial += slices[(me - 2 - step) % size]
    return partial.div_(size)


def reduced(how: Reduction, reduce: Reduce, gradient: Tensor) -> Steps[Tensor]:
    """The mean by the algorithm that a policy names: (S,) fp32 of this rank's shard."""
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

    Returns:
        (S,) fp32 mean of this rank's shard.
    """
    piece, nbytes = mean.numel(), codec.frame_bytes(mean.numel())

    def write(frame: Tensor) -> None:
        ops.encode(codec, mean, frame, noise=noise)

    exchange = yield from gather_frames(wire, axes, write, nbytes, tag)
    whole = mean.new_empty(piece * math.prod(axis.size for axis in axes))
    ops.decode(codec, gathered(exchange, axes, nbytes), placed(whole, axes[::-1], piece, strides[::-1]))
    exchange.close()
    return whole
