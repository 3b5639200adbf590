"""The reduce-scatter of one unit's gradient: the mirror of :mod:`impl.unit.weight_gather`.

The path of a gradient through a ZeRO++ step, on two nodes of two ranks, file by file.  A unit's P padded
elements end as shards of S = P / 4; F is the bytes of a frame of S elements.

1. *Autograd accumulates a parameter's gradient*; :mod:`impl.engine.hooks` calls
   :meth:`GradientReduction.collect`, which moves it to its place in one flat buffer (P,), in the type of the
   pass; where frames are elements, that buffer is the message of hop 1 itself.  Passes that accumulate
   without reducing add there, in fp32.
2. *The unit's last gradient starts the reduction*, in its turn in the
   :class:`~impl.plan.reduction_queue.ReductionQueue`, which is the same on all ranks.
3. *Hop 1 stays inside the node*: :class:`impl.comm.reduce_scatter.Reduction` encodes the slices in the order
   (local, node, S), INT4 with qgZ (paper section 3.3), and sends each rank of the node its slices,
   (node, F) = (2, F) uint8.
4. *The sum is encoded again*: one kernel decodes, adds in fp32 and encodes, when the next unit's first
   gradient arrives; by then hop 1 has arrived.
5. *Hop 2 crosses the link*, among the ranks of equal local index: one frame (F,) to each of the two nodes.
6. *The mean is decoded* when the bucket is full, or the pass over: (S,) fp32, the sum over 4.
7. *The master's gradient takes it*: :mod:`impl.unit.master_shard` stores it, or adds it to that of earlier
   micro-batches.
8. *The optimizer steps the masters* and clears their gradients.

On a GPU steps 4 to 7 are queued on a side stream as soon as hop 1 is posted, and
:meth:`GradientReduction.post_next_hop` joins it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl.codecs.codec import Blocked, Codec, Raw
from impl.codecs.reference import DTYPES
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange
from impl.comm.reduce_scatter import Reduction, Ring
from impl.errors import ZeroError
from impl.plan.policy import Policy
from impl.plan.reduction_queue import Progress, ReductionQueue
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.traffic import Tag
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import Member
from impl.unit.master_shard import MasterShard


class GradientReduction:
    """The reductions of one unit on one rank, by its ``collective``, in the ``queue``'s turn for it."""

    def __init__(
        self,
        geometry: UnitGeometry,
        context: UnitContext,
        master_shard: MasterShard,
        members: Sequence[Member],
        queue: ReductionQueue,
    ) -> None:
        self._geometry, self._wire, self._passes = geometry, context.wire, context.passes
        self._reserve, self._meter, self._clock = context.gradients, context.meter, context.clock
        self._master_shard, self._members, self.elements = master_shard, members, geometry.padded
        self._dtype, self._gaps, self._outer = DTYPES[context.policy.compute], geometry.gaps, geometry.outer
        self.progress, self.queue = Progress.COLLECTING, queue
        self.missing = set[int]()  # members whose gradient has not arrived, once another one has
        self.local: Tensor | None = None  # (P,) the local gradients, while any wait to be reduced
        self._buffer: Tensor | None = None  # their memory, from the reserve,
        self._opened: Exchange | None = None  # or the message that is
        self._written: set[int] = set()  # members with a gradient there
        self._arrival: Arrival | None = None  # of the hops after the first, beside a GPU's computation
        self._errors: Errors | None = None  # of the gradient codecs, from the first reduction on
        self.follow(context.policy)

    def follow(self, policy: Policy) -> None:
        """Reduce as ``policy`` says from here on; carried errors stay."""
        self._policy = policy
        geometry, wire = self._geometry, self._wire
        topology, rank = wire.mesh.topology, wire.mesh.rank
        hops, (replicas, codec) = policy.reduce_axes(topology), policy.replica_axes(topology)
        wire.make_groups([*(axis for axis, _ in hops), *replicas])
        kind = Ring if policy.reduce == "ring" else Reduction
        self.collective = kind(
            wire=wire,
            hops=hops,
            tag=Tag("backward", "gradients", geometry.name),
            piece=geometry.piece,
            strides=[geometry.piece_stride(axis.stride) for axis, _ in hops],
            chunks=chunked(geometry.piece, policy.chunks, policy.grain),
            replicas=[(axis, geometry.piece_stride(axis.stride)) for axis in replicas],
            replica_codec=codec,
            sums=policy.sums,
        )
        plain = policy.reduce != "ring" and policy.feedback is None and geometry.trainable
        self._collects = plain and self.collective.collects(DTYPES[policy.compute])
        self._draws = any(codec.stochastic for codec in policy.gradients)
        # An offset, or a rotation, changes padding's zeros; the change must not reach norms or weights.
        self._pads = () if all(map(_keeps_zeros, policy.gradients)) else geometry.pads(rank)

    # Collecting

    def collect(self, number: int) -> bool:
        """Take the gradient that has just arrived at member ``number``; True if none is missing."""
        if not self.missing:
            self._begin()
        # A block's first: post at the same event on all ranks.  Outer units' gradients come from all over the
        # model, and one just after a reduction's start would have its first hop waited for at once.
        if len(self.missing) == len(self._members) and not self._outer:
            self.queue.post_next_hops()
        self._add(number, self._members[number].parameter)
        self.missing.discard(number)
        if not self.missing:
            self.progress = Progress.READY
        return not self.missing

    def collect_outside(self, number: int) -> None:
        """Take the gradient that an ``autograd.Function`` brought to the placeholder of member ``number``."""
        self._begin()  # more may arrive: it stays missing, if none does to the end of the pass
        self._add(number, self._members[number].placeholder)

    def _begin(self) -> None:
        """Begin collecting, unless that has begun; refuse a gradient that comes after the reduction."""
        if self.progress >= Progress.REDUCING:
            raise ZeroError(
                f"a gradient arrived for unit {self._geometry.name!r}, which was already reduced in this "
                "backward pass: in reentrant checkpoints a parameter that is used twice brings its gradient "
                "in parts, so use_reentrant=False there; a loss with weights belongs inside zero.unsharded()"
            )
        if self.progress is Progress.COLLECTING and not self.missing:
            self.missing = set(range(len(self._members)))

    def _add(self, number: int, leaf: nn.Parameter) -> None:
        """Move the gradient of ``leaf`` to the part of member ``number``, cleared or not."""
        flat = self._open() if self.local is None else self.local
        shape, strides, offset = self._members[number].view
        part = flat.as_strided(shape, strides, flat.storage_offset() + offset)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # a released leaf asks for no values here
            gradient = leaf.grad
            assert gradient is not None  # noqa: S101  # just accumulated
            if gradient.layout is not torch.strided:  # of an embedding it may be sparse; messages are dense
                gradient = gradient.to_dense()
            if number in self._written:
                part.add_(gradient)
            else:
                part.copy_(gradient)
                self._written.add(number)
            leaf.grad = None

    def _open(self) -> Tensor:
        """(P,) to collect in: the masters' gradients, the message of hop 1, or a buffer of the reserve."""
        reduces = not self._passes.accumulating
        if reduces and not self.collective.hops and self._in_place:  # one rank: its gradient is the mean
            self.local = self._master_shard.gradient()
        elif reduces and self._collects and self.queue.is_next(self):
            self._opened = self.collective.open_message()
            self.local = self._opened.send.view(-1).view(self._dtype)
            self._meter.add("local_gradients", self.local.nbytes)
        else:
            dtype = self._dtype if reduces else torch.float32  # other passes will add to it
            self._buffer = self._reserve.take(self.elements * dtype.itemsize // self._dtype.itemsize)
            self.local = self._buffer.view(dtype)
        return self.local

    def _completed(self) -> Tensor:
        """(P,) all gradients, with zeros in padding and where none arrived: other ranks may have one."""
        flat = self._open() if self.local is None else self.local
        for start, end in self._gaps:
            flat[start:end].zero_()
        for number in set(range(len(self._members))) - self._written:
            slot = self._geometry.slots[number]
            flat[slot.offset : slot.end].zero_()
        return flat

    def _forget(self) -> None:
        """Let the buffer go: the gradients are encoded, or in the message."""
        if self.local is not None and self._opened is not None:
            self._meter.add("local_gradients", -self.local.nbytes)
        if self._buffer is not None:
            self._reserve.give_back(self._buffer)
        self.local = self._buffer = self._opened = None
        self._written.clear()

    def end_pass(self) -> None:
        """End a backward pass: land its means; gradients that it only collected stay."""
        self.missing.clear()
        self.progress = Progress.COLLECTING
        if self._master_shard.placement.shard:
            self._master_shard.land()

    # Reducing

    @property
    def _in_place(self) -> bool:
        """Whether the mean may be written to the masters' gradients."""
        shard = self._master_shard
        return not self.collective.replicas and not shard.placement.shard and shard.fresh

    def start(self) -> None:
        """Hand over the gradients that have arrived, and post the first hop."""
        self.missing.clear()
        self.progress = Progress.FAILED  # unless this returns
        reduction = self.collective
        reduction.start(
            self._completed(),
            key=self._clock.gradients(self._geometry.name, self._wire.mesh.rank) if self._draws else None,
            errors=self.feedback(),
            opened=self._opened,
            out=self._master_shard.gradient() if self._in_place else None,
        )
        self._forget()
        stream, self._arrival = self._wire.reductions, None
        if stream is not None and reduction.mean is None and self._wire.observer is None:
            with self._wire.beside(stream) as self._arrival:
                self._take(reduction.finish())
        self.progress = Progress.REDUCING
        if reduction.mean is not None:  # of one rank
            self.post_next_hop(finish=True)

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop's message, or ``finish``: wait until the mean is in this rank's shard.

        [Note: deferred last hop] says when the mean is taken.  A ZeroError after an interruption.
        """
        if self.progress is Progress.FAILED:
            raise ZeroError(
                "a reduction that was interrupted cannot be finished: its gradients are lost on this rank; "
                "call drop_gradients(), finish_backward() and zero_grad(), and run the step anew"
            )
        arrival, reduction = self._arrival, self.collective
        if self.progress is not Progress.REDUCING or (arrival is not None and not finish):
            return
        self.progress = Progress.FAILED  # unless this returns
        if arrival is not None:
            self._wire.join(arrival)
        else:
            if not finish:
                reduction.post_next_hop()
                if reduction.mean is None:
                    self.progress = Progress.REDUCING
                    return
            self._take(reduction.finish())
        reduction.close()
        self.progress = Progress.REDUCED

    def _take(self, mean: Tensor) -> None:
        """Let this rank's shard take ``mean`` (S,)."""
        for start, end in self._pads:
            mean[start:end] = 0
        if self._wire.observer is not None:
            rank = self._wire.mesh.rank
            (first, end), (low, _) = self._geometry.received_piece(rank), self._geometry.bounds(rank)
            self._wire.observer.averaged(self._geometry.name, first, mean[first - low : end - low])
        self._master_shard.take(mean)

    def drop(self) -> None:
        """Forget gradients that were collected and not reduced, and carried errors."""
        if self._opened is not None and self.progress is not Progress.FAILED:  # the other ranks wait for it
            self._opened.post()
            self._opened.wait()
            self._opened.close()
        self._forget()
        self.missing.clear()
        if self.progress < Progress.REDUCING:
            self.progress = Progress.COLLECTING
        self.clear_feedback()

    def feedback(self) -> Errors | None:
        """The errors that this step's reduction starts with; None without feedback, or if frozen."""
        if self._policy.feedback is None or not self._geometry.trainable:
            return None
        if self._errors is None:
            mesh = self._wire.mesh
            self._errors = Errors(self._policy, mesh.topology, self._geometry.piece, mesh.device)
            self._meter.add("feedback", self._errors.nbytes)
        self._errors.begin(self._clock.step)
        return self._errors

    def clear_feedback(self) -> None:
        """Forget the carried errors: their gradients are not used."""
        if self._errors is not None:
            self._errors.clear()


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero in any block; unknown of users' codecs."""
    return isinstance(codec, Raw) or (isinstance(codec, Blocked) and not (codec.asymmetric or codec.hadamard))
