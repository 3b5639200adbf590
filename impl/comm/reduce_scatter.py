"""Reduces and scatters gradients hop by hop, with any codec: qgZ's two-hop all-to-all (paper section 3.3).

A gradient seen as ``(axis 0, axis 1, ..., shard)`` is transposed while it is encoded, sent along axis 0,
summed in ascending source order, encoded again for axis 1, and so on; the result is the mean.  There is also
a ring, and the gather of the mean between groups that hold copies.

:meth:`Reduction.start` posts the first message, ``post_next_hop`` the next, and ``finish`` returns the mean.

[Note: deferred last hop]
After a message of an earlier hop the caller calls again soon: the next hop cannot be posted before this one
has arrived, and the link would idle.  After the last hop nothing is left to post.  If it travels between
nodes, on the slowest link, its wait is left to :meth:`Reduction.finish`; inside a node it arrives at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import FP32, Codec, Sums
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key, Noise, shard_stride
from impl.comm.all_gather import FrameGather, are_elements, by_axes
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange, InMemory
from impl.comm.wire import Hop, Wire
from impl.plan.topology import Axis
from impl.plan.traffic import Tag


@dataclass(kw_only=True, eq=False)
class Reduction:
    """Reduces gradients of one size, by an all-to-all a hop; one at a time is under way.

    A chunk is posted on its next hop as soon as the following chunk was posted on this one, so that the last
    hop's link is used while most of the gradient is still to be encoded.  All ranks post in this order.

    ``mean`` is set from its arrival until :meth:`finish` returns it.
    """

    wire: Wire
    # axes with their codecs, first hop first; the product of their sizes is the world; none for one rank
    hops: Sequence[tuple[Axis, Codec]]
    tag: Tag
    piece: int  # elements of the mean on each rank
    strides: Sequence[int] = ()  # by hop, pieces between neighbours' pieces; the axes' own by default
    # (start, end) of the chunks of a piece, whose hops overlap; one by default
    chunks: Sequence[tuple[int, int]] = ()
    # axes between groups that hold copies of a shard, first hop first, with their strides: along them pieces
    # are gathered, and every rank decodes its own, too, so that groups stay bit-equal
    replicas: Sequence[tuple[Axis, int]] = ()
    replica_codec: Codec = FP32  # of these pieces
    sums: Sums = "fp32"  # type of partial sums
    mean: Tensor | None = field(init=False, default=None)  # (S,) fp32 of this rank's shard

    def __post_init__(self) -> None:
        rank_order = tuple(axis.stride for axis, _ in self.hops)
        self.strides = tuple(self.strides) or rank_order
        self.chunks = tuple(self.chunks) or ((0, self.piece),)
        self.sizes = tuple(axis.size for axis, _ in self.hops)  # ranks along each hop
        self._in_order = self.strides == rank_order  # whether pieces lie in the order of ranks
        last = [axis for axis, _ in (self.replicas or self.hops)[-1:]]
        self._crosses = any(map(self.wire.mesh.topology.crosses, last))  # whether the last hop crosses nodes
        lengths = [end - start for start, end in self.chunks]
        # by hop and chunk
        self._frame_bytes = [[codec.frame_bytes(length) for length in lengths] for _, codec in self.hops]
        # shape and strides of a gradient (world * piece,) as (axis 0, axis 1, ..., piece)
        self._by_hops = (*self.sizes, self.piece), (*(stride * self.piece for stride in self.strides), 1)

    def noise(self, key: Key | None, hop: int, start: int = 0) -> Noise | None:
        """Random bits for ``hop`` from element ``start`` of each shard on; None for plain codecs.

        The hop after the last is the gather between groups.
        """
        codec = self.hops[hop][1] if hop < len(self.hops) else self.replica_codec
        if key is None or not codec.stochastic:
            return None
        rank, strides = self.wire.mesh.rank, [stride * shard_stride(self.piece) for stride in self.strides]
        done = zip(self.hops[:hop], strides[:hop], strict=True)
        before = sum(axis.digit(rank) * stride for (axis, _), stride in done)
        return replace(key, hop=hop).noise(before + start, tuple(strides[hop:]))

    def collects(self, dtype: torch.dtype) -> bool:
        """Whether gradients of ``dtype`` may be collected in the first hop's message, in the unit's order.

        Without error feedback they may where frames are the elements themselves, and the ranks of the hop
        either receive whole rows of it, or read each other's messages and pick their parts.
        """
        if not self.hops or len(self.chunks) > 1 or not self._in_order:
            return False
        (axis, codec), *rest = self.hops
        return are_elements(codec, dtype, self.piece) and (not rest or self.wire.shares_memory(axis))

    def open_message(self) -> Exchange:
        """The first hop's exchange, with ``send`` of (world * piece,) elements, where :meth:`collects`."""
        nbytes = math.prod(self.sizes[1:]) * self._frame_bytes[0][0]
        return self.wire.all_to_all(self.hops[0][0], nbytes, self.tag)

    def start(
        self,
        gradient: Tensor,  # (world * piece,) floating-point, contiguous; not used after the return
        *,
        key: Key | None = None,  # of stochastic codecs, with this rank as the source, without the hop
        errors: Errors | None = None,  # of the gradient codecs, for error feedback
        opened: Exchange | None = None,  # :meth:`open_message`, if the gradient was collected in it
        out: Tensor | None = None,  # (piece,) fp32 for the mean; a fresh tensor by default
    ) -> None:
        """Start the mean of all ranks' gradients: post the first messages.

        A ValueError refuses a gradient whose elements do not lie side by side, since messages are cut from
        its memory.
        """
        if not gradient.is_contiguous() or gradient.is_neg():
            negated = ", negated" if gradient.is_neg() else ""
            raise ValueError(
                f"a gradient to reduce must be contiguous, got strides {gradient.stride()}{negated}: "
                "pass gradient.resolve_neg().contiguous()"
            )
        self._key, self._errors, self._opened, self._out = key, errors, opened, out
        self._observer = self.wire.observer
        self._gather: FrameGather | None = None  # between groups, once the mean of a piece is computed
        self._under_way: list[Exchange] = []  # by chunk, on its present hop
        self._left = len(self.hops)  # messages to post, before those between groups
        self.mean = None
        if self._observer is not None:
            self._observer.local(self.tag.unit, gradient)
        if self.hops:
            self._start(gradient)
        elif out is None:  # one rank
            self.mean = gradient.to(torch.float32, copy=True)
        else:
            self.mean = out if gradient is out else out.copy_(gradient)

    def _start(self, gradient: Tensor) -> None:
        self._turn = 0
        for index in range(len(self.chunks)):
            self._under_way.append(self._send_first(gradient, index))
            self._forward()

    def post_next_hop(self) -> None:
        """Post the next message, or set the mean: see [Note: deferred last hop]."""
        if self.mean is not None:
            return
        if self._left:
            self._forward()
        elif self._gather is None and self.replicas:
            self._send_to_replicas()
        elif self._gather is not None and self._gather.left:
            self._gather.post_next_hop()
        elif not self._crosses:
            self.mean = self.finish()

    def finish(self) -> Tensor:
        """(S,) fp32 mean of this rank's shard, once."""
        mean, self.mean = self.mean, None
        if mean is not None:
            return mean
        while self._left:
            self._forward()
        if not self.replicas:
            return self._reduced(self._out)
        gather, axes = self._gather or self._send_to_replicas(), [axis for axis, _ in self.replicas[::-1]]
        numel = self.piece * math.prod(axis.size for axis in axes)
        whole = torch.empty(numel, dtype=torch.float32, device=self.wire.mesh.device)
        pieces = by_axes(whole, axes, self.piece, [stride for _, stride in self.replicas[::-1]])
        ops.decode(self.replica_codec, gather.finish(), pieces)
        gather.close()
        return whole

    def close(self) -> None:
        """Drop the exchanges of a finished reduction; on a GPU once its stream was joined."""
        self._under_way.clear()
        self._opened = self._gather = None

    def _send_to_replicas(self) -> FrameGather:
        """Gather the groups' means (piece,) of their pieces."""
        codec, hop, mean = self.replica_codec, len(self.hops), self._reduced(None)
        axes = [axis for axis, _ in self.replicas]
        gather = self._gather = FrameGather(self.wire, axes, codec.frame_bytes(self.piece))
        message = gather.open(self.tag)
        ops.encode(codec, mean, message, noise=self.noise(self._key, hop))
        if self._observer is not None:
            name = "+".join(axis.name for axis in axes)
            self._observer.encoded(self.tag.unit, Hop(hop, name, codec), mean, message)
        gather.post()
        return gather

    def _forward(self) -> None:
        """Send chunks on by one hop, where the following chunk has been sent on their present one."""
        hops, chunks = len(self.hops), len(self.chunks)
        for hop in range(1, hops):
            if 0 <= (index := self._turn - hop) < chunks:
                self._under_way[index] = self._send_on(hop, index)
        self._turn += 1
        if self._turn >= chunks:  # the last chunk was posted on a further hop
            self._left -= 1

    def _reduced(self, out: Tensor | None) -> Tensor:
        codec, fp32 = self.hops[-1][1], torch.float32
        mean = torch.empty(self.piece, dtype=fp32, device=self.wire.mesh.device) if out is None else out
        for (start, end), exchange in zip(self.chunks, self._under_way, strict=True):
            ops.decode_sum(codec, exchange.wait(), mean[start:end], sums=self.sums)  # (source, F)
            exchange.close()
        return mean.div_(math.prod(self.sizes))

    def _send_first(self, gradient: Tensor, index: int) -> Exchange:
        """Encode a chunk of all shards, transposed, and send it along the first hop."""
        (axis, codec), (start, end), frames = self.hops[0], self.chunks[index], None
        carried = None if self._errors is None else self._errors.carried(0, start, end)
        slices = gradient.as_strided(*self._by_hops)[..., start:end]  # (axis 0, axis 1, ..., chunk)
        values = slices if self._observer is None else _with_errors(slices, carried)
        if (exchange := self._opened) is None:
            frame, rest = self._frame_bytes[0][index], self.sizes[1:]
            exchange = self.wire.all_to_all(axis, math.prod(rest) * frame, self.tag)
            frames = exchange.send.view(*self.sizes, frame)
            ops.encode(codec, slices, frames, noise=self.noise(self._key, 0, start), carried=carried)
        if self._observer is not None:
            self._observer.encoded(self.tag.unit, Hop(0, axis.name, codec), values, frames)
        exchange.post()
        return exchange

    def _send_on(self, hop: int, index: int) -> Exchange:
        """Sum a chunk's messages of the hop before, encode the sum, and send it along ``hop``."""
        received, observer = self._under_way[index], self._observer
        (_, before), (axis, codec) = self.hops[hop - 1 : hop + 1]
        (start, end), rest = self.chunks[index], self.sizes[hop:]
        carried = None if self._errors is None else self._errors.carried(hop, start, end)
        frame = self._frame_bytes[hop][index]
        exchange = self.wire.all_to_all(axis, math.prod(rest[1:]) * frame, self.tag)
        send = exchange.send.view(*rest, frame)
        if hop == 1 and self._opened is not None:
            frames = self._own_part(received)
        else:
            frames = received.wait().view(-1, *rest, self._frame_bytes[hop - 1][index])
        if observer is not None:
            summed = torch.empty((*rest, end - start), dtype=torch.float32, device=frames.device)
            ops.decode_sum(before, frames, summed, sums=self.sums)
            values = _with_errors(summed, carried)
        noise = self.noise(self._key, hop, start)
        ops.decode_sum_encode(
            before, codec, frames, send, end - start, noise=noise, carried=carried, sums=self.sums
        )
        received.close()
        if observer is not None:
            observer.encoded(self.tag.unit, Hop(hop, axis.name, codec), values, send)
        exchange.post()
        return exchange

    def _own_part(self, exchange: Exchange) -> Tensor:
        """(source, sizes of the later hops..., F): this rank's part of collected gradients."""
        frame = self._frame_bytes[0][0]
        assert isinstance(exchange, InMemory)  # noqa: S101  # no other message collects for several hops
        rows = exchange.messages()  # (source, world * F)
        first, *strides = (stride * frame for stride in self.strides)
        start = rows.storage_offset() + self.hops[0][0].digit(self.wire.mesh.rank) * first
        shape = (len(rows), *self.sizes[1:], frame)
        return rows.as_strided(shape, (rows.stride(0), *strides, 1), start)


@dataclass(kw_only=True, eq=False)
class Ring(Reduction):
    """One ring over all ranks, regardless of nodes: ``world - 1`` steps with partial sums on the wire.

    A partial sum is encoded again at every step, so errors add up (paper section 3.3).
    """

    def _start(self, gradient: Tensor) -> None:
        ((axis, self._codec),) = self.hops
        self._axis, self._me = axis, axis.digit(self.wire.mesh.rank)
        self._slices = gradient.view(axis.size, -1).to(torch.float32, copy=True)  # (rank, S)
        self._partial = self._slices[(self._me - 1) % axis.size].clone()
        self._step, self._left = 0, axis.size - 1
        self._post()

    def close(self) -> None:
        """See :meth:`Reduction.close`."""
        super().close()
        self._slices = self._partial = torch.empty(0)

    def _forward(self) -> None:
        self._receive()
        self._post()

    def _reduced(self, out: Tensor | None) -> Tensor:
        self._receive()
        return torch.div(self._partial, self._axis.size, out=self._partial if out is None else out)

    def _post(self) -> None:
        codec, size = self._codec, self._axis.size
        exchange = self._exchange = self.wire.shift(self._axis, self._frame_bytes[0][0], self.tag)
        noise = None
        if codec.stochastic and self._key is not None:
            first = (self._me - 1 - self._step) % size * shard_stride(self.piece)
            noise = replace(self._key, hop=self._step).noise(first)
        ops.encode(codec, self._partial, exchange.send, noise=noise)
        if self._observer is not None:
            hop = Hop(self._step, self._axis.name, codec)
            self._observer.encoded(self.tag.unit, hop, self._partial, exchange.send)
        exchange.post()
        self._left -= 1

    def _receive(self) -> None:
        ops.decode(self._codec, self._exchange.wait()[0], self._partial)
        self._exchange.close()
        self._partial += self._slices[(self._me - 2 - self._step) % self._axis.size]
        self._step += 1


def _with_errors(x: Tensor, carried: Carried | None) -> Tensor:
    """``x`` with the carried errors of feedback."""
    return x if carried is None else x.float() + carried.error.float()
