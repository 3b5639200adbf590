"""Gathering weights and reducing gradients, hop by hop, with any codec.

A collective is a generator that stops after each posted message, so that the caller can compute
while it travels; :class:`Transfer` drives it.  What is sent and in which order follows from the
axes alone.

Gather (paper section 3.1 and 3.2): a shard is encoded once; every hop forwards the received
frames unchanged, so all ranks decode the same bytes.  Reduce (section 3.3): a gradient seen as
``(axis 0, axis 1, ..., shard)`` is transposed while it is encoded, sent along axis 0, summed in
fp32 in ascending source order, encoded again for axis 1, and so on; the result is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from impl import ops
from impl.codec import Codec
from impl.topology import Axis
from impl.wire import Exchange, Tag, Wire

T = TypeVar("T")
Steps = Generator[None, None, T]


class Transfer:
    """A collective under way: starts at once, goes on when told.

    All ranks must call :meth:`advance` and :meth:`wait` in the same order: each may post the next
    hop's message, and messages of one axis match by order.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self._steps: Steps[None] | None = steps
        self.advance()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._steps is None

    def advance(self) -> None:
        """Wait for the message under way and post the next one, if there is one."""
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None

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
) -> Steps[Exchange]:
    """Forward frames along ``axes``, one hop after the other.

    Args:
        wire: what sends.
        axes: at least one.
        write: fills the first hop's message, (nbytes,) uint8.
        nbytes: size of that message.
        tag: for the ledger.
        ring: the hop is the library's ring over the whole world.

    Returns:
        The last exchange, received but not closed: its ``wait()`` gives
        ``(size of last axis, bytes)``, earlier axes inside a row, the latest outermost.
    """
    held: Exchange | None = None
    for axis in axes:
        exchange = wire.all_gather(axis, nbytes, tag, ring=ring)
        if held is None:
            write(exchange.send)
        else:
            received = held.wait()
            exchange.send.view(received.shape).copy_(received)
            held.close()
        exchange.post()
        yield
        exchange.wait()
        nbytes *= axis.size
        held = exchange
    assert held is not None  # noqa: S101  # there is an axis
    return held


def placed(flat: Tensor, axes: Sequence[Axis], shard: int) -> Tensor:
    """View of ``flat`` (world * S,) as (sizes of ``axes`` in this order..., S), by rank digits."""
    sizes = [axis.size for axis in axes]
    strides = [axis.stride * shard for axis in axes]
    return flat.as_strided((*sizes, shard), (*strides, 1))


def reduce_gradients(
    wire: Wire, hops: Sequence[tuple[Axis, Codec]], gradient: Tensor, tag: Tag
) -> Steps[Tensor]:
    """Average ``gradient`` over all ranks; each rank gets its shard.

    ``gradient`` may be overwritten once the first message is posted.

    Args:
        wire: what sends.
        hops: axes with their codecs, first hop first; together they number the world.
        gradient: (world * S,) of any floating-point type.
        tag: for the ledger.

    Returns:
        (S,) fp32 mean of this rank's shard.
    """
    world = 1
    for axis, _ in hops:
        world *= axis.size
    shard = gradient.numel() // world
    sizes = [axis.size for axis, _ in hops]
    before: tuple[Codec, Exchange] | None = None
    for number, (axis, codec) in enumerate(hops):
        frame = codec.frame_bytes(shard)
        rest = sizes[number + 1 :]  # the axes that are still to come
        exchange = wire.all_to_all(axis, math.prod(rest) * frame, tag)
        send = exchange.send.view(axis.size, *rest, frame)
        if before is None:
            ops.encode(codec, placed(gradient, [axis for axis, _ in hops], shard), send)
        else:
            ops.decode_sum_encode(before[0], codec, _frames(before, sizes[number:], shard), send, shard)
            before[1].close()
        exchange.post()
        yield
        before = codec, exchange
    assert before is not None  # noqa: S101  # there is a hop
    mean = torch.empty(shard, dtype=torch.float32, device=gradient.device)
    ops.decode_sum(before[0], _frames(before, [], shard), mean)
    before[1].close()
    return mean.div_(world)


def _frames(received: tuple[Codec, Exchange], rest: Sequence[int], shard: int) -> Tensor:
    """(source, rest..., F) uint8: what an exchange brought."""
    codec, exchange = received
    return torch.unflatten(exchange.wait(), 1, (*rest, codec.frame_bytes(shard)))


def ring_reduce(wire: Wire, axis: Axis, codec: Codec, gradient: Tensor, tag: Tag) -> Steps[Tensor]:
    """The same mean by one ring over all ranks: ``world - 1`` steps, partial sums on the wire.

    Blind to nodes: what a library does without knowing the topology.  A partial sum is cast to
    the codec's type at every step.
    """
    size = axis.size
    me = axis.digit(wire.mesh.rank)
    slices = gradient.view(size, -1).to(
        torch.float32, copy=True
    )  # (rank, S); the caller's buffer is free again
    shard = slices.shape[1]
    partial = slices[(me - 1) % size].clone()
    for step in range(size - 1):
        exchange = wire.shift(axis, codec.frame_bytes(shard), tag)
        ops.encode(codec, partial, exchange.send)
        exchange.post()
        yield
        ops.decode(codec, exchange.wait()[0], partial)
        exchange.close()
        partial += slices[(me - 2 - step) % size]
    return partial.div_(size)
