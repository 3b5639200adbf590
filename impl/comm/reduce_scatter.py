"""Reduce-scatters gradients hop by hop, with any codec, like qgZ's two-hop all-to-all (paper section 3.3).

A gradient is viewed as ``(axis 0, axis 1, ..., shard)``.  It is transposed while it is encoded, and sent along
axis 0.  Each rank decodes what it receives, sums it in ascending order of the sources, encodes the sum for
axis 1, and so on.  After the last hop the sum becomes the mean.  :class:`Ring` is an alternative: one ring over
all ranks.  If several groups of ranks hold copies of a shard, the means of their pieces are all-gathered between
these groups at the end.

:meth:`Reduction.start` posts the first message, ``post_next_hop`` posts the next one, and ``finish`` returns the
mean.

[Note: deferred last hop]
After posting a hop that is not the last, the caller should call ``post_next_hop`` soon: the next hop can only be
posted after this one has arrived, and until then the next hop's link idles.  After the last hop nothing is left to
post.  If the last hop crosses between nodes, on the slowest link, only :meth:`Reduction.finish` waits for it.  If
it stays inside a node, it arrives at once, and ``post_next_hop`` takes the mean.
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
    """Reduces gradients of one size with one all-to-all for each hop; used for one reduction at a time.

    Each piece of the gradient may be cut into chunks.  As soon as chunk ``i + 1`` has been posted on a hop, chunk ``i``
    is posted on the next hop.  Thus the last hop's link is in use while most of the gradient is still to be encoded.
    All ranks post in this order.

    ``mean`` is set when the mean has arrived, until :meth:`finish` returns it.
    """

    wire: Wire
    # each hop's axis and codec, first hop first; the product of the sizes is the world; empty for one rank
    hops: Sequence[tuple[Axis, Codec]]
    tag: Tag
    piece: int  # elements of the mean that each rank computes
    # for each hop, the distance in pieces between the pieces of neighbours; by default the axes' strides
    strides: Sequence[int] = ()
    # (start, end) of the chunks of a piece, whose hops overlap; one chunk by default
    chunks: Sequence[tuple[int, int]] = ()
    # The axes between groups that hold copies of a shard, first hop first, with the distances in pieces along
    # them.  Along these axes pieces are gathered.  Every rank decodes its own piece too, so that copies stay
    # bit-equal.
    replicas: Sequence[tuple[Axis, int]] = ()
    replica_codec: Codec = FP32  # the codec of pieces that are gathered between groups
    sums: Sums = "fp32"  # the type of partial sums
    mean: Tensor | None = field(init=False, default=None)  # (S,) fp32, the mean of this rank's shard

    def __post_init__(self) -> None:
        rank_order = tuple(axis.stride for axis, _ in self.hops)
        self.strides = tuple(self.strides) or rank_order
        self.chunks = tuple(self.chunks) or ((0, self.piece),)
        self.sizes = tuple(axis.size for axis, _ in self.hops)  # ranks along each hop's axis
        self._in_order = self.strides == rank_order  # whether pieces are in rank order in the gradient
        last = [axis for axis, _ in (self.replicas or self.hops)[-1:]]
        self._crosses = any(map(self.wire.mesh.topology.crosses, last))  # whether the last hop crosses nodes
        lengths = [end - start for start, end in self.chunks]
        # bytes of a frame, by hop and chunk
        self._frame_bytes = [[codec.frame_bytes(length) for length in lengths] for _, codec in self.hops]
        # shape and strides that view a gradient (world * piece,) as (axis 0, axis 1, ..., piece)
        self._by_hops = (*self.sizes, self.piece), (*(stride * self.piece for stride in self.strides), 1)

    def noise(self, key: Key | None, hop: int, start: int = 0) -> Noise | None:
        """Return the random bits of ``hop`` from element ``start`` of each piece on.

        ``hop = len(hops)`` stands for the gather between groups.  Returns None without a key, or if the hop's codec
        does not round stochastically.
        """
        codec = self.hops[hop][1] if hop < len(self.hops) else self.replica_codec
        if key is None or not codec.stochastic:
            return None
        rank, strides = self.wire.mesh.rank, [stride * shard_stride(self.piece) for stride in self.strides]
        done = zip(self.hops[:hop], strides[:hop], strict=True)
        before = sum(axis.digit(rank) * stride for (axis, _), stride in done)
        return replace(key, hop=hop).noise(before + start, tuple(strides[hop:]))

    def collects(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of ``dtype`` may be collected straight in the first hop's message.

        The message then has the elements in the unit's order.  This requires that a frame is just its elements, that
        pieces are in rank order and are not cut into chunks, and that a rank can pick its parts out of the messages:
        if there is a single hop, its part is a whole row; otherwise the ranks must read each other's messages in
        shared memory.  The caller must not use error feedback.
        """
        if not self.hops or len(self.chunks) > 1 or not self._in_order:
            return False
        (axis, codec), *rest = self.hops
        return are_elements(codec, dtype, self.piece) and (not rest or self.wire.shares_memory(axis))

    def open_message(self) -> Exchange:
        """Open the first hop's exchange, whose ``send`` has (world * piece,) elements; needs :meth:`collects`."""
        nbytes = math.prod(self.sizes[1:]) * self._frame_bytes[0][0]
        return self.wire.all_to_all(self.hops[0][0], nbytes, self.tag)

    def start(
        self,
        gradient: Tensor,
        *,
        key: Key | None = None,
        errors: Errors | None = None,
        opened: Exchange | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Start the mean of all ranks' gradients: post the first messages.

        Args:
            gradient: (world * piece,) floating-point and contiguous; it is not used after the return.
            key: the key of stochastic codecs' random bits, with this rank as the source.
            errors: the carried errors of error feedback.
            opened: the exchange of :meth:`open_message`, if the gradient was collected in it.
            out: (piece,) fp32, receives the mean; a new tensor by default.

        Raises:
            ValueError: if ``gradient`` is not contiguous, because messages are cut from its memory.
        """
        if not gradient.is_contiguous() or gradient.is_neg():
            negated = ", negated" if gradient.is_neg() else ""
            raise ValueError(
                f"a gradient to reduce must be contiguous, got strides {gradient.stride()}{negated}: "
                "pass gradient.resolve_neg().contiguous()"
            )
        self._key, self._errors, self._opened, self._out = key, errors, opened, out
        self._observer = self.wire.observer
        self._gather: FrameGather | None = (
            None  # the gather between groups, once the piece's mean is computed
        )
        self._under_way: list[Exchange] = []  # for each chunk, the exchange of its present hop
        self._left = len(self.hops)  # hops that are not posted, without those between groups
        self.mean = None
        if self._observer is not None:
            self._observer.local(self.tag.unit, gradient)
        if self.hops:
            self._start(gradient)
        elif out is None:  # with one rank, the gradient is the mean
            self.mean = gradient.to(torch.float32, copy=True)
        else:
            self.mean = out if gradient is out else out.copy_(gradient)

    def _start(self, gradient: Tensor) -> None:
        self._turn = 0
        for index in range(len(self.chunks)):
            self._under_way.append(self._send_first(gradient, index))
            self._forward()

    def post_next_hop(self) -> None:
        """Post the next hop's messages, or take the mean; see [Note: deferred last hop]."""
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
        """Finish all hops and return the mean of this rank's shard, (S,) fp32; to be called once."""
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
        """Drop the exchanges of a finished reduction; on a GPU, call it only after its side stream was joined."""
        self._under_way.clear()
        self._opened = self._gather = None

    def _send_to_replicas(self) -> FrameGather:
        """Start to gather the means (piece,) of all groups that hold copies of this rank's shard."""
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
        """Post the chunks whose next hop is due, in the order that the class describes."""
        hops, chunks = len(self.hops), len(self.chunks)
        for hop in range(1, hops):
            if 0 <= (index := self._turn - hop) < chunks:
                self._under_way[index] = self._send_on(hop, index)
        self._turn += 1
        if self._turn >= chunks:  # the last chunk has been posted on one more hop
            self._left -= 1

    def _reduced(self, out: Tensor | None) -> Tensor:
        codec, fp32 = self.hops[-1][1], torch.float32
        mean = torch.empty(self.piece, dtype=fp32, device=self.wire.mesh.device) if out is None else out
        for (start, end), exchange in zip(self.chunks, self._under_way, strict=True):
            ops.decode_sum(codec, exchange.wait(), mean[start:end], sums=self.sums)  # (source, F)
            exchange.close()
        return mean.div_(math.prod(self.sizes))

    def _send_first(self, gradient: Tensor, index: int) -> Exchange:
        """Encode a chunk of all pieces, transposed, and post it on the first hop."""
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
        """Sum the messages that a chunk has received on the previous hop, encode the sum, and post it on ``hop``."""
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
        """Return this rank's part of all ranks' collected gradients, (source, sizes of the later hops..., F)."""
        frame = self._frame_bytes[0][0]
        assert isinstance(exchange, InMemory)  # noqa: S101  # collects() with several hops needs shared memory
        rows = exchange.messages()  # (source, world * F)
        first, *strides = (stride * frame for stride in self.strides)
        start = rows.storage_offset() + self.hops[0][0].digit(self.wire.mesh.rank) * first
        shape = (len(rows), *self.sizes[1:], frame)
        return rows.as_strided(shape, (rows.stride(0), *strides, 1), start)


@dataclass(kw_only=True, eq=False)
class Ring(Reduction):
    """Reduces over one ring of all ranks, regardless of nodes, in ``world - 1`` steps that send partial sums.

    A partial sum is encoded again at every step, so encoding errors add up (paper section 3.3).
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
    """Return ``x`` plus the carried errors of error feedback, which is what is encoded."""
    return x if carried is None else x.float() + carried.error.float()
