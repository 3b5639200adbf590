"""Reduce-scatters gradients hop by hop, with any codec, like qgZ's two-hop all-to-all (paper section 3.3).

A hop is one exchange along one axis of ranks.  A gradient is viewed as ``(axis 0, axis 1, ..., shard)``.  A rank
encodes its gradient, transposed to the order in which ranks receive it, and sends the encoded gradient along axis 0.
The rank decodes the messages that it receives, its own included, and sums them in ascending order of their senders.  It
encodes this sum, sends the encoded sum along axis 1, and so on.  After the last hop, each rank divides its sum by the
number of ranks, to get the mean of its shard.  An alternative is :class:`Ring`, which sends partial sums along one ring
of all ranks.

There may be several *state groups*: groups of ranks, each of which holds a copy of all shards.  If gradients are
averaged over all groups, these hops give a rank the mean of only a part of its shard.  Further hops then all-gather the
means of the other parts.

:meth:`Reduction.start` posts the first messages, each call of ``post_next_hop`` posts the next messages, and ``finish``
returns the mean.  docs/design/engine.md says how to add another kind of reduction.

[Note: deferred last hop]
``post_next_hop`` waits for the messages of one hop, and posts the next hop.  The link of the next hop idles until then,
so the caller should call the method soon.  Once the last hop is posted, nothing is left to post, and there are two
cases.  A last hop between nodes uses the slowest link, so only :meth:`Reduction.finish` waits for it.  A last hop
inside a node takes little time, so one more call of ``post_next_hop`` waits for this hop, and sets ``mean``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Sums
from impl.codecs.reference import NAMES, Carried
from impl.codecs.rounding_noise import Key, Noise, shard_stride
from impl.comm.all_gather import FrameGather, by_axes
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange, InMemory
from impl.comm.wire import EncodedHop, Wire
from impl.plan.hops import Hop, in_turns, reduction_hops
from impl.plan.traffic import Tag
from impl.policy.policy import Policy


def reduction_of(policy: Policy, wire: Wire, tag: Tag, piece: int, grain: int) -> Reduction:
    """Return the reduction that averages gradients (world * piece,) in the way that ``policy`` sets.

    The policy sets the hops (exchanges) and their codecs, the number of chunks, and whether the reduction is a
    :class:`Ring`.

    Args:
        policy: the policy for the gradient's unit.
        wire: sends the messages.
        tag: the phase, purpose and unit under which the ledger books the messages.
        piece: number of elements of a piece.  The gradient consists of one piece for each of the ``world`` ranks.  Each
            rank sums one piece.  With local steps (DiLoCo), each rank sums all pieces of its shard instead.
        grain: number of elements.  A piece may be sent in several chunks, which start at multiples of this number.
    """
    kind = Ring if policy.reduce == "ring" else Reduction
    hops = reduction_hops(policy, wire.mesh.topology, piece, grain)
    return kind(wire=wire, hops=hops, tag=tag, sums=policy.sums)


@dataclass(kw_only=True, eq=False)
class Reduction:
    """Averages gradients of one size over ranks, hop by hop; used for one reduction at a time.

    A hop is one exchange along one axis of ranks.

    A *piece* is the part of the gradient that one rank sums.  A piece may be cut into chunks, which are sent
    separately, so that hops of different chunks overlap.  :func:`impl.plan.hops.in_turns` says in which order chunks
    are posted.

    Usually a piece is the rank's whole shard.  This is not so with *state groups*: several groups of ranks, each of
    which holds a copy of all shards.  If gradients are averaged over all groups, each rank that has a copy of a shard
    sums a different piece of this shard.  These ranks then all-gather the means of the pieces, encoded and without
    chunks.  A rank decodes the mean of its own piece too, instead of using the exact mean, so that the copies of the
    shard stay bit-equal.

    ``mean`` is None until the mean has arrived, and again after :meth:`finish` has returned the mean.
    """

    wire: Wire
    # First the hops that sum gradients, then the hops that gather means; empty for one rank.
    hops: Sequence[Hop]
    tag: Tag
    sums: Sums = "fp32"  # the type of partial sums
    mean: Tensor | None = field(init=False, default=None)  # (S,) fp32, the mean of this rank's shard

    def __post_init__(self) -> None:
        self._summing = [hop for hop in self.hops if hop.source in ("gradient", "sum")]
        self._gather = FrameGather(self.wire, self.hops[len(self._summing) :])
        self._sizes = [hop.axis.size for hop in self._summing]
        if self.hops:
            self._piece, self._chunks = self.hops[0].numel, self.hops[0].chunks
            # shape and strides that view a gradient (n * piece,) as (axis 0, axis 1, ..., piece)
            strides = [hop.stride * self._piece for hop in self._summing]
            self._by_hops = (*self._sizes, self._piece), (*strides, 1)
            # A list for each moment at which messages are posted: the messages to post, as (number of the hop, chunk).
            # All ranks post in this order.
            self._events = self._turns()
            self._events += [[(number, 0)] for number in range(len(self._summing), len(self.hops))]

    def noise(self, key: Key | None, hop: int, start: int = 0) -> Noise | None:
        """Return the random bits with which this rank rounds its message for hop number ``hop``, counted from 0.

        A hop is one exchange of the reduction, and a piece is the part of the gradient that one rank sums.  If pieces
        are sent in chunks, the message has one chunk of each piece, and ``start`` is the number of the chunk's first
        element in its piece.

        Returns None if ``key`` is None, or if the hop's codec does not round stochastically.
        """
        if key is None or not self.hops[hop].codec.stochastic:
            return None
        rank, apart = self.wire.mesh.rank, shard_stride(self._piece)
        before = sum(done.axis.digit(rank) * done.stride * apart for done in self._summing[:hop])
        strides = tuple(later.stride * apart for later in self._summing[hop:])
        return replace(key, hop=hop).noise(before + start, strides)

    def collects(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of ``dtype`` may be written straight to the first hop's message.

        A hop is one exchange of the reduction.  The first hop's message then has the gradient's elements unencoded, in
        their order in the unit.  A piece is the part of the gradient that one rank sums.  All of these conditions must
        hold:

        - The reduction has a hop, and is not a ring.
        - The codec of the first hop would not change elements of ``dtype``, and would add no scales or padding.
        - The pieces are in the gradient in the order of the ranks that sum them.
        - Pieces are not cut into chunks.
        - No hop keeps errors of error feedback.
        - There is a single hop, or the ranks of the first hop read each other's messages in shared memory.  With
          several hops, a rank receives several pieces from each message.  As these need not be next to each other in
          the message, the rank can read them in shared memory, but they cannot be sent as one block.
        """
        plain = [
            hop.kind == "all_to_all" and hop.keeps == "nothing" and hop.stride == hop.axis.stride
            for hop in self._summing
        ]
        if not plain or not all(plain) or len(self._chunks) > 1:
            return False
        first, *rest = self._summing
        return first.sends_elements(NAMES.get(dtype)) and (not rest or self.wire.shares_memory(first.axis))

    def open_message(self) -> Exchange:
        """Start the exchange of the first hop, and return it, so that the caller can write the gradient to its message.

        The caller writes the whole gradient to ``send`` of the exchange, and then passes the exchange to :meth:`start`.
        Call this only if :meth:`collects` returns True.
        """
        return self.wire.all_to_all(self.hops[0].axis, self.hops[0].nbytes, self.tag)

    def start(
        self,
        gradient: Tensor,
        *,
        key: Key | None = None,
        errors: Errors | None = None,
        opened: Exchange | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Start to average the ranks' gradients: post the first messages.

        Args:
            gradient: (n * piece,) for the n ranks whose gradients are averaged, floating-point and contiguous.  When
                this method has returned and ``opened`` is None, the caller may overwrite the gradient.
            key: determines the random bits of codecs that round stochastically; its ``source`` must be this rank.
            errors: the errors of error feedback, which are added before encoding; None without error feedback.
            opened: the exchange that :meth:`open_message` returned, if the gradient was written to its ``send``.
            out: (S,) fp32, memory in which the mean of this rank's shard is returned; by default new memory.

        Raises:
            ValueError: if ``gradient`` is not contiguous, or is negated lazily (``is_neg()``), because messages are cut
                from its memory.
        """
        if not gradient.is_contiguous() or gradient.is_neg():
            negated = " and is_neg()" if gradient.is_neg() else ""
            raise ValueError(
                "a gradient to reduce must be contiguous, and not negated lazily by torch: got strides "
                f"{gradient.stride()}{negated}; "
                "pass gradient.resolve_neg().contiguous()"
            )
        self._key, self._errors, self._opened, self._out = key, errors, opened, out
        self._observer = self.wire.observer
        self._under_way: list[Exchange] = []  # for each chunk, the exchange of its present hop
        self._posted = 0  # events whose messages are posted
        self.mean = None
        if self._observer is not None:
            self._observer.local(self.tag.unit, gradient)
        if self.hops:
            self._post_next(gradient)
        elif out is None:  # with one rank, the gradient is the mean
            self.mean = gradient.to(torch.float32, copy=True)
        else:
            self.mean = out if gradient is out else out.copy_(gradient)

    def post_next_hop(self) -> None:
        """Wait for the messages under way, and post the next hop's messages.

        If all hops have been posted already, the method depends on the last hop.  If the last hop stays inside a node,
        the method finishes the reduction and sets ``mean``.  If the last hop crosses between nodes, the method does
        nothing; see [Note: deferred last hop].
        """
        if self.mean is not None:
            return
        if self._posted < len(self._events):
            self._post_next()
        elif not self.hops[-1].crosses:
            self.mean = self.finish()

    def finish(self) -> Tensor:
        """Finish all hops (exchanges), and return the mean of this rank's shard, (S,) fp32.

        Call this once for each reduction.
        """
        mean, self.mean = self.mean, None
        if mean is not None:
            return mean
        while self._posted < len(self._events):
            self._post_next()
        return self._gathered() if self._gather.hops else self._summed(self._out)

    def close(self) -> None:
        """Drop the exchanges of a finished reduction.

        On a GPU, call this only after the computation has waited for the side stream, on which the reduction's later
        hops (exchanges) run.
        """
        self._under_way.clear()
        self._opened = None

    def _turns(self) -> list[list[tuple[int, int]]]:
        """Return the messages that each call of :meth:`_post_next` posts: a list for each call.

        A list has (hop, chunk) for each message.  Only messages of the hops that sum gradients are listed, not those of
        later hops, which gather means.
        """
        return in_turns(len(self._summing), len(self._chunks))

    def _post_next(self, gradient: Tensor | None = None) -> None:
        """Post the messages whose turn it is; the first call needs the ``gradient``, the later calls do not."""
        for number, part in self._events[self._posted]:
            self._post(number, part, gradient)
        self._posted += 1

    def _post(self, number: int, part: int, gradient: Tensor | None) -> None:
        """Post chunk ``part`` of hop (exchange) number ``number``; in a :class:`Ring`, post step ``part``."""
        match self.hops[number].source:
            case "gradient":
                assert gradient is not None  # noqa: S101  # this is the first event
                self._under_way.append(self._send_first(gradient, part))
            case "sum":
                self._under_way[part] = self._send_on(number, part)
            case "mean":
                self._gather_mean(number)
            case _:
                self._gather.post_next_hop()

    # Hops of sums

    def _summed(self, out: Tensor | None) -> Tensor:
        """Wait for the last hop that sums, and return the mean of this rank's piece, (piece,) fp32.

        A piece is the part of the gradient that one rank sums.  The mean is written to ``out``, or to a new tensor if
        ``out`` is None.
        """
        codec, mean = self._summing[-1].codec, self._new(self._piece) if out is None else out
        ranks = math.prod(self._sizes)
        for (start, end), exchange in zip(self._chunks, self._under_way, strict=True):
            ops.decode_sum(
                codec, exchange.wait(), mean[start:end], sums=self.sums, divisor=ranks
            )  # (source, F)
            exchange.close()
        return mean

    def _send_first(self, gradient: Tensor, index: int) -> Exchange:
        """Encode chunk ``index`` of all pieces, post it on the first hop, and return the exchange.

        A piece is the part of the gradient that one rank sums.  Encoding transposes the pieces to the order in which
        the hop's ranks receive them.  If the caller has already written the gradient to the message
        (:meth:`open_message`), the message is posted as it is.
        """
        hop, (start, end), frames = self.hops[0], self._chunks[index], None
        carried = None if self._errors is None else self._errors.carried(0, start, end)
        slices = gradient.as_strided(*self._by_hops)[..., start:end]  # (axis 0, axis 1, ..., chunk)
        values = slices if self._observer is None else _with_errors(slices, carried)
        if (exchange := self._opened) is None:
            exchange = self._open(hop, index)
            frames = exchange.send.view(*self._sizes, hop.frame_bytes[index])
            ops.encode(hop.codec, slices, frames, noise=self.noise(self._key, 0, start), carried=carried)
        if self._observer is not None:
            self._observer.encoded(self.tag.unit, EncodedHop(0, hop.axis.name, hop.codec), values, frames)
        exchange.post()
        return exchange

    def _open(self, hop: Hop, index: int) -> Exchange:
        """Start the exchange of chunk ``index`` on ``hop``, and return it; exchanges of several chunks may overlap."""
        return self.wire.all_to_all(hop.axis, hop.sizes[index], self.tag, in_line=len(self._chunks) == 1)

    def _send_on(self, number: int, index: int) -> Exchange:
        """Sum the messages received for chunk ``index``, encode the sum, and post it on hop ``number``.

        A chunk is a part of each piece of the gradient that is sent by itself.  Returns the exchange of this hop.
        """
        received, observer, (start, end) = self._under_way[index], self._observer, self._chunks[index]
        before, hop = self.hops[number - 1 : number + 1]
        rest = self._sizes[number:]
        carried = None if self._errors is None else self._errors.carried(number, start, end)
        exchange = self._open(hop, index)
        send = exchange.send.view(*rest, hop.frame_bytes[index])
        if number == 1 and self._opened is not None:
            frames = self._own_part(received)
        else:
            frames = received.wait().view(-1, *rest, before.frame_bytes[index])
        if observer is not None:
            summed = self._new(*rest, end - start)
            ops.decode_sum(before.codec, frames, summed, sums=self.sums)
            values = _with_errors(summed, carried)
        codecs, noise = (before.codec, hop.codec), self.noise(self._key, number, start)
        ops.decode_sum_encode(
            *codecs, frames, send, end - start, noise=noise, carried=carried, sums=self.sums
        )
        received.close()
        if observer is not None:
            observer.encoded(self.tag.unit, EncodedHop(number, hop.axis.name, hop.codec), values, send)
        exchange.post()
        return exchange

    def _own_part(self, exchange: Exchange) -> Tensor:
        """Return a view of the pieces that this rank receives in the first hop.

        A piece is the part of the gradient that one rank sums.  Each rank along the first hop's axis has written its
        whole gradient to its message in shared memory (:meth:`open_message`).  The result is a view of these messages,
        (source, sizes of the later hops..., F) uint8, where F is the number of bytes of a piece.
        """
        frame = self.hops[0].nbytes // self.hops[0].frames
        assert isinstance(exchange, InMemory)  # noqa: S101  # collects() with several hops needs shared memory
        rows = exchange.messages()  # (source, world * F)
        first, *strides = (hop.stride * frame for hop in self._summing)
        start = rows.storage_offset() + self.hops[0].axis.digit(self.wire.mesh.rank) * first
        shape = (len(rows), *self._sizes[1:], frame)
        return rows.as_strided(shape, (rows.stride(0), *strides, 1), start)

    # Hops that gather means

    def _gather_mean(self, number: int) -> None:
        """Encode the mean of this rank's piece, and post the first of the hops that gather the means of all pieces.

        ``number`` is the number of this first hop.  A piece is the part of a shard that one rank sums, if several ranks
        hold copies of the shard.
        """
        mean = self._summed(None)

        def encode(hop: Hop, message: Tensor) -> None:
            ops.encode(hop.codec, mean, message, noise=self.noise(self._key, number))
            if self._observer is not None:
                encoded = EncodedHop(
                    number, "+".join(each.axis.name for each in self._gather.hops), hop.codec
                )
                self._observer.encoded(self.tag.unit, encoded, mean, message)

        self._gather.start(self.tag, encode)

    def _gathered(self) -> Tensor:
        """Wait for the means of all pieces of this rank's shard, and return the mean of the shard, (S,) fp32.

        A piece is the part of a shard that one rank sums, if several ranks hold copies of the shard.
        """
        backwards, whole = self._gather.hops[::-1], self._out
        axes, strides = [hop.axis for hop in backwards], [hop.stride for hop in backwards]
        if whole is None:
            whole = self._new(self._piece * math.prod(axis.size for axis in axes))
        pieces = by_axes(whole, axes, self._piece, strides)
        ops.decode(backwards[0].codec, self._gather.finish().view(*pieces.shape[:-1], -1), pieces)
        self._gather.close()
        return whole

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.wire.mesh.device)


@dataclass(kw_only=True, eq=False)
class Ring(Reduction):
    """Averages gradients over one ring of all ranks, in which nodes play no role.

    In each of ``world - 1`` steps, every rank sends a partial sum to the next rank.  The sum is encoded again at every
    step, so encoding errors add up (paper section 3.3).
    """

    def _turns(self) -> list[list[tuple[int, int]]]:
        return [[(0, step)] for step in range(self._sizes[0] - 1)]

    def _post(self, number: int, part: int, gradient: Tensor | None) -> None:
        if number:
            super()._post(number, part, gradient)
        else:
            self._send_step(part, gradient)

    def close(self) -> None:
        """Drop the exchanges of a finished reduction, and its copy of the gradient.

        On a GPU, call this only after the computation has waited for the side stream, on which the reduction's later
        hops (exchanges) run.
        """
        super().close()
        self._slices = self._partial = torch.empty(0)

    def _summed(self, out: Tensor | None) -> Tensor:
        self._receive(self._sizes[0] - 2)
        return torch.div(self._partial, self._sizes[0], out=self._partial if out is None else out)

    def _send_step(self, step: int, gradient: Tensor | None) -> None:
        """Encode the partial sum of ``step``, and send it to the next rank.

        In the first step, the partial sum is one slice of this rank's ``gradient``.  In later steps, the rank receives
        the partial sum of the previous rank, and adds its own slice of the same elements; ``gradient`` is then None.
        """
        hop = self.hops[0]
        if gradient is not None:
            self._me = hop.axis.digit(self.wire.mesh.rank)
            self._slices = gradient.view(hop.axis.size, -1).to(torch.float32, copy=True)  # (rank, S)
            self._partial = self._slices[(self._me - 1) % hop.axis.size].clone()
        else:
            self._receive(step - 1)
        exchange = self._exchange = self.wire.shift(hop.axis, hop.nbytes, self.tag, in_line=True)
        noise = None
        if hop.codec.stochastic and self._key is not None:
            first = (self._me - 1 - step) % hop.axis.size * shard_stride(self._piece)
            noise = replace(self._key, hop=step).noise(first)
        ops.encode(hop.codec, self._partial, exchange.send, noise=noise)
        if self._observer is not None:
            encoded = EncodedHop(step, hop.axis.name, hop.codec)
            self._observer.encoded(self.tag.unit, encoded, self._partial, exchange.send)
        exchange.post()

    def _receive(self, step: int) -> None:
        """Wait for the partial sum that was sent in ``step``, and add this rank's gradient of the same elements."""
        hop = self.hops[0]
        ops.decode(hop.codec, self._exchange.wait()[0], self._partial)
        self._exchange.close()
        self._partial += self._slices[(self._me - 2 - step) % hop.axis.size]


def _with_errors(x: Tensor, carried: Carried | None) -> Tensor:
    """Return the values that are encoded: ``x``, plus the carried errors of error feedback if there are any."""
    return x if carried is None else x.float() + carried.error.float()
