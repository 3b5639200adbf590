"""Reduce-scatters the gradient of one unit; the counterpart for weights is :mod:`impl.unit.weight_gather`.

A unit is a group of parameters that are gathered and reduced together.  The list follows the gradient of a unit through
one ZeRO++ step on two nodes of two ranks, and names the files that take part.  The unit has P elements with padding.
At the end, each of the four ranks has the mean of its shard of S = P / 4 elements.  A frame, which is one encoded
shard, has F bytes.

1. *Autograd accumulates a parameter's gradient.*  A hook in :mod:`impl.engine.hooks` calls
   :meth:`GradientReduction.collect`, which moves the gradient to its place in one flat buffer (P,) in the
   compute type.  If the codec of hop 1 sends the elements as they are, this buffer can be the message of hop 1
   itself.  Passes that accumulate without reducing add into an fp32 buffer instead.
2. *The unit's last gradient makes the reduction ready.*  The reduction starts when its turn comes in the
   :class:`~impl.plan.reduction_queue.ReductionQueue`, whose order is the same on all ranks.
3. *Hop 1 stays inside the node.*  :class:`impl.comm.reduce_scatter.Reduction` encodes the gradient's four shards, in
   the order (local, node, S).  In qgZ the codec is INT4 (paper section 3.3).  Each rank receives from every rank of its
   node the two shards that it will add up: (node, F) = (2, F) uint8.
4. *The sums are encoded*, when the first gradient of the next unit arrives.  By then the messages of hop 1 have usually
   arrived.  One kernel decodes these messages, adds them in fp32 and encodes the sums.
5. *Hop 2 crosses the link between nodes*, among the ranks of equal local index: one frame (F,) to each of
   the two nodes.
6. *The mean is decoded*, (S,) fp32: the sum divided by 4.  This happens at the end of the pass, or earlier if the next
   reduction would exceed the reduce bucket.  The reduce bucket is the most elements that may be in reduction at one
   time.
7. *The mean becomes the gradient of the masters*, the fp32 weights that the optimizer steps.
   :mod:`impl.unit.master_shard` stores the mean, or adds it to the mean of earlier micro-batches.
8. *The optimizer steps the masters* and clears their gradients.

If a GPU's stream waits for messages, as with NCCL, steps 4 to 7 are enqueued on a side stream right after hop 1 is
posted.  :meth:`GradientReduction.post_next_hop` with ``finish`` then makes the computation wait for their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impl.codecs.codec import Blocked, Codec, Raw
from impl.codecs.reference import DTYPES
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange
from impl.comm.reduce_scatter import Reduction, reduction_of
from impl.errors import ZeroError
from impl.plan.reduction_queue import Progress
from impl.plan.traffic import Tag
from impl.policy.policy import Feedback, Policy
from impl.policy.shard_layout import UnitGeometry
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import Member
from impl.unit.master_shard import MasterShard
from impl.unit.own_reduction import OwnReduction


class GradientReduction:
    """Collects the gradients of one unit on one rank, and reduce-scatters them.

    A unit is a group of parameters that are gathered and reduced together.

    The hooks of the model call :meth:`collect` for each gradient.  The attribute ``collective`` is the object that
    sends and adds the gradients, hop by hop; a hop is one exchange of messages in a group of ranks.  The
    :class:`~impl.plan.reduction_queue.ReductionQueue` decides when the reduction starts, when it posts the message of
    each hop, and when it waits for the mean.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        context: UnitContext,
        master_shard: MasterShard,
        members: Sequence[Member],
    ) -> None:
        self._geometry, self._wire, self._passes = geometry, context.wire, context.passes
        self._reserve, self._meter, self._clock = context.gradients, context.meter, context.clock
        self._master_shard, self._members, self.elements = master_shard, members, geometry.padded
        self._dtype, self._gaps, self._outer = DTYPES[context.policy.compute], geometry.gaps, geometry.outer
        self.progress = Progress.COLLECTING
        # The members whose gradient has not arrived in this pass; empty before the unit's first gradient.
        self.missing = set[int]()
        self.local: Tensor | None = None  # (P,) the local gradients, while any wait to be reduced
        self._buffer: Tensor | None = None  # the memory of ``local``, if it comes from the reserve
        # The first hop's messages, if ``local`` is the memory of one of them.
        self._opened: Exchange | None = None
        self._written: set[int] = set()  # members that have a gradient in ``local``
        # On a GPU, places in ``local`` and the gradients to be copied there, all with one launch.
        self._places: list[Tensor] = []
        self._arrived: list[Tensor] = []
        # Whether all gradients of the unit are copied to ``local`` with one launch, after the last has arrived.  This
        # is False for the root's unit and the persistent unit: their gradients arrive throughout the pass, and until
        # its end both ``local`` and the gradients would take memory.
        self._together = context.wire.streams and not geometry.outer
        self._arrival: Arrival | None = None  # on a GPU, the end of the hops after the first
        self._errors: Errors | None = None  # the gradient codecs' carried errors, from the first reduction on
        self.own: OwnReduction | None = None  # the user's own reduction, if the policy names one
        self._prepared: list[_Way] = []  # one for each policy of a schedule
        self.follow(context.policy)

    def follow(self, policy: Policy) -> None:
        """From now on, reduce gradients in the hops and with the codecs that ``policy`` names.

        A hop is one exchange of messages, along one axis of ranks.  With error feedback, an encoding keeps its error,
        which is added to the next gradient.  This method does not clear the kept errors.
        """
        self._take_up(self._way(policy))

    def prepare(self, policies: Sequence[Policy]) -> None:
        """Prepare the reduction for each of the ``policies`` of a schedule, and use the first policy from now on.

        A schedule changes the policy during training.  If a policy has error feedback, memory is allocated here for the
        errors that it carries from step to step.  All policies share this memory, so that :meth:`take_up` allocates
        nothing.
        """
        self._prepared = [self._way(policy) for policy in policies]
        carrying = next((way for way in self._prepared if way.feedback is not None), None)
        if carrying is not None and self._geometry.trainable:
            self._take_up(carrying)
            self.feedback()
        self.take_up(0)

    def take_up(self, number: int) -> None:
        """From now on, reduce as policy ``number`` says, an index (from 0) of the list that :meth:`prepare` was given.

        This must not be called while a reduction is under way.
        """
        self._take_up(self._prepared[number])

    def _take_up(self, way: _Way) -> None:
        self.collective: Reduction | OwnReduction = way.collective
        self._feedback, self._collects, self._draws = way.feedback, way.collects, way.draws
        self._pads = way.pads

    def _way(self, policy: Policy) -> _Way:
        """Return the object that reduces the unit's gradient as ``policy`` says, with facts about the reduction."""
        geometry, wire = self._geometry, self._wire
        if policy.own_reduce is not None and geometry.trainable:
            if self.own is None:  # otherwise its state would be lost
                self.own = OwnReduction(policy.own_reduce, geometry, wire)
            return _Way(
                self.own, policy.feedback, collects=False, draws=False, pads=geometry.pads(wire.mesh.rank)
            )
        tag = Tag("backward", "gradients", geometry.name)
        reduction = reduction_of(policy, wire, tag, geometry.piece, policy.grain)
        hops = reduction.hops
        wire.make_groups(hop.axis for hop in hops)
        # A codec with offsets or a rotation may decode the zeros in padding to other values.  These are set to
        # zero again in the mean, since padding must not count in norms or change weights.
        pads = () if all(_keeps_zeros(hop.codec) for hop in hops) else geometry.pads(wire.mesh.rank)
        draws = any(hop.codec.stochastic for hop in hops)
        collects = reduction.collects(self._dtype)
        return _Way(reduction, policy.feedback, collects=collects, draws=draws, pads=pads)

    # Collecting

    def begin(self) -> bool:
        """Prepare to collect a gradient that has arrived; return whether other units should post their next messages.

        Call this before :meth:`collect`, for every gradient.  At the unit's first gradient in a pass, the gradients of
        all its parameters are noted as missing.

        The result is True for the first gradient in a pass if the unit is a block of the model.  The caller then posts
        the next messages of those reductions of other units that are under way.  All ranks do so in the same order.

        The result is False for later gradients.  It is always False for two units: the root's unit, which has the
        parameters outside of blocks, and the persistent unit, which has small parameters.  A gradient of these two
        units may arrive just after a block's reduction has started.  If this rank posted the block's second hop at that
        moment, it would first have to wait for the block's first hop.

        Raises:
            ZeroError: if the unit's reduction has started in this pass.
        """
        if self.progress >= Progress.REDUCING:
            raise ZeroError(
                f"a gradient arrived for unit {self._geometry.name!r}, which was already reduced in this "
                "backward pass: if the model uses a parameter twice in reentrant checkpoints, set "
                "use_reentrant=False; if the loss uses parameters directly, compute the loss inside zero.unsharded()"
            )
        if self.progress is Progress.COLLECTING and not self.missing:
            self.missing = set(range(len(self._members)))
        return len(self.missing) == len(self._members) and not self._outer

    def collect(self, number: int, *, is_next: bool) -> bool:
        """Move the gradient that has just arrived into the unit's buffer; return whether all gradients have arrived.

        Call :meth:`begin` first.  "All gradients" are the gradients of the unit's parameters.

        Args:
            number: the index in the unit of the parameter whose gradient has arrived.
            is_next: whether this unit's reduction is the next that will start.  If it is, the buffer may be the message
                of the reduction's first hop (its first exchange of messages) itself.  The gradient then need not be
                copied to a message later.
        """
        self._add(number, self._members[number].parameter, is_next=is_next)
        self.missing.discard(number)
        if not self.missing:
            self.progress = Progress.READY
        return not self.missing

    def collect_outside(self, number: int, *, is_next: bool) -> None:
        """Add a gradient that has arrived at a placeholder to the buffer in which the unit's gradients are collected.

        While the unit is sharded, modules hold a placeholder, an object without values, in place of a parameter.  The
        placeholder gets a gradient if an ``autograd.Function`` was called with it.  The gradient of the parameter
        itself still counts as missing, since it may arrive later.  If it never arrives, the reduction starts at the end
        of the pass.

        Args:
            number: the index of the parameter in the unit.
            is_next: whether this unit's reduction is the next that will start; see :meth:`collect`.
        """
        self.begin()
        self._add(number, self._members[number].placeholder, is_next=is_next)

    def _add(self, number: int, leaf: nn.Parameter, *, is_next: bool) -> None:
        """Add ``leaf.grad`` to the parameter's part of the unit's local gradient, and set ``leaf.grad`` to None.

        The local gradient (``self.local``) is one flat tensor with a part for each parameter of the unit.  A part holds
        arbitrary values at first, so the first gradient of a parameter is copied there, and later ones are added.

        Args:
            number: the index of the parameter in the unit.
            leaf: the parameter itself, or the placeholder that modules hold while the parameter has no values.
            is_next: whether this unit's reduction is the next that will start; it matters only if the local gradient is
                not yet allocated.
        """
        flat = self._open(is_next=is_next) if self.local is None else self.local
        shape, strides, offset = self._members[number].view
        part = flat.as_strided(shape, strides, flat.storage_offset() + offset)
        # The leaf may be a placeholder, whose values are not needed here.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            gradient = leaf.grad
            assert gradient is not None  # noqa: S101  # autograd has just accumulated it
            if gradient.layout is not torch.strided:  # an embedding's may be sparse, but messages are dense
                gradient = gradient.to_dense()
            if number in self._written:
                if self._places:
                    self._copy_arrived()
                part.add_(gradient)
            elif self._together and not self._passes.accumulating:
                self._places.append(part)
                self._arrived.append(gradient.detach())
                self._written.add(number)
            else:
                part.copy_(gradient)
                self._written.add(number)
            leaf.grad = None

    def _copy_arrived(self) -> None:
        """Copy the gradients in the list ``_arrived`` to their places in ``local``, with one kernel launch."""
        torch._foreach_copy_(self._places, self._arrived)  # there is no public function for it
        self._places.clear()
        self._arrived.clear()

    def _open(self, *, is_next: bool) -> Tensor:
        """Choose the memory (P,) in which this rank's gradients are collected, and return it.

        The attribute ``local`` is this memory from now on.

        A pass that adds up gradients without reducing them takes an fp32 buffer from the pool (the reserve).  A pass
        that reduces takes the first possible memory in this list:

        - the memory of the masters' gradients (masters are the fp32 weights that the optimizer steps).  This is
          possible on a single rank, where the local gradient is the mean.  Besides, the shard must be on the device, no
          master may have a gradient yet, and no user's own class may reduce the gradients;
        - the message of hop 1 (the reduction's first exchange).  The codec must send the elements as they are, and this
          reduction must be the next to start (``is_next``);
        - a buffer from the pool, in the compute type.
        """
        reduces = not self._passes.accumulating
        if reduces and self.own is None and not self.collective.hops and self._in_place:
            self.local = self._master_shard.gradient()
        elif reduces and self._collects and is_next:
            self._opened = self.collective.open_message()
            self.local = self._opened.send.view(-1).view(self._dtype)
            self._meter.add("local_gradients", self.local.nbytes)
        else:
            # Accumulated gradients are fp32, since later passes will add to them.
            dtype = self._dtype if reduces else torch.float32
            self._buffer = self._reserve.take(self.elements * dtype.itemsize // self._dtype.itemsize)
            self.local = self._buffer.view(dtype)
        return self.local

    def _completed(self) -> Tensor:
        """Return the collected gradients of all parameters of the unit, (P,).

        Padding is set to zero, and so are the parts of parameters without a gradient.  Parameters without a gradient
        are reduced too, since other ranks may have gradients for them.
        """
        flat = self._open(is_next=False) if self.local is None else self.local
        if self._places:
            self._copy_arrived()
        empty = []
        for start, end in self._gaps:  # a loop, since a comprehension costs a further call in each step
            empty.append(flat[start:end])
        for number in set(range(len(self._members))) - self._written:
            slot = self._geometry.slots[number]
            empty.append(flat[slot.offset : slot.end])
        if self._together and len(empty) > 1:
            torch._foreach_zero_(empty)  # one launch; there is no public function for it
        else:
            for part in empty:
                part.zero_()
        return flat

    def _forget(self) -> None:
        """Release ``local``, the memory in which gradients were collected.

        To be called when these gradients have been encoded, or are not needed any more.
        """
        if self.local is not None and self._opened is not None:
            self._meter.add("local_gradients", -self.local.nbytes)
        if self._buffer is not None:
            self._reserve.give_back(self._buffer)
        self.local = self._buffer = self._opened = None
        self._places.clear()
        self._arrived.clear()
        self._written.clear()

    def drop_local(self) -> None:
        """Forget the gradients that earlier passes have collected without reducing them; call it between passes.

        Unlike :meth:`drop`, this method keeps the encoding errors that error feedback carries to later steps.
        """
        if self.local is not None:
            self._forget()

    def end_pass(self) -> None:
        """End a backward pass; gradients that the pass collected without reducing them are kept in ``local``.

        If the shard is offloaded, wait until the mean gradient is in host memory.
        """
        self.missing.clear()
        self.progress = Progress.COLLECTING
        if self._master_shard.placement.shard:
            self._master_shard.land()

    # Reducing

    @property
    def _in_place(self) -> bool:
        """Whether the mean may be written straight to the memory of the masters' gradients.

        Masters are the fp32 weights that the optimizer steps.  The mean may be written there if the shard is on the
        device and no master has a gradient yet.
        """
        shard = self._master_shard
        return not shard.placement.shard and shard.fresh

    def start(self) -> None:
        """Start the reduction with the gradients that have arrived, and post the messages of the first hop.

        Who posts the later hops depends on the number of ranks and on the device:

        - On one rank there are no hops.  This method finishes the reduction at once.
        - On a GPU whose stream waits for messages, as with NCCL, this method enqueues all later hops, on a side stream.
        - On other devices, :meth:`post_next_hop` posts the later hops.

        In two cases it is always :meth:`post_next_hop` that posts the later messages and finishes the reduction: if a
        user's own class reduces the gradients, and on several ranks if the wire has an observer (an object that looks
        at gradients).
        """
        self.missing.clear()
        self.progress = Progress.FAILED  # stays so if this method is interrupted
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
        # A user's method stays on the computation's stream, since it allocates memory that no other stream may use.
        aside = self.own is None and reduction.mean is None and self._wire.observer is None
        if stream is not None and aside:
            with self._wire.beside(stream, posted=True) as self._arrival:
                self._take(reduction.finish())
        self.progress = Progress.REDUCING
        if reduction.mean is not None:  # with one rank there is no hop
            self.post_next_hop(finish=True)

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the messages of the reduction's next hop (exchange of messages), or finish the reduction.

        If no reduction is under way, the method does nothing.

        With ``finish``, it posts the messages of all hops that are left, waits for the mean, and gives the mean to the
        :class:`~impl.unit.master_shard.MasterShard`.  If :meth:`start` has enqueued all of this on a GPU, it only makes
        the computation's stream wait for the end of this work.

        Without ``finish``, it does one of the following.  The first case that applies counts:

        - A user's own class reduces the gradients: it lets the user's object post its next messages.
        - :meth:`start` has enqueued all hops on a GPU: it does nothing.
        - A hop is left: it waits for the messages of the previous hop, and posts the messages of the next hop.
        - All hops are posted, and the last hop stays inside a node: it waits for the mean, and gives the mean to the
          master shard.
        - All hops are posted, and the last hop crosses between nodes: it does nothing.  Only a call with ``finish``
          waits for this slow hop ([Note: deferred last hop] in :mod:`impl.comm.reduce_scatter`).

        Raises:
            ZeroError: if the reduction was interrupted.
        """
        if self.progress is Progress.FAILED:
            raise ZeroError(
                "a reduction that was interrupted cannot be finished, and its gradients are lost on this rank: "
                "call zero.drop_gradients(), zero.finish_backward() and optimizer.zero_grad(), and run the step anew"
            )
        arrival, reduction = self._arrival, self.collective
        if self.progress is not Progress.REDUCING or (arrival is not None and not finish):
            return
        self.progress = Progress.FAILED  # stays so if this method is interrupted
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

    def average(self, gradient: Tensor) -> Tensor:
        """Average ``gradient`` (P,) over all ranks, and return this rank's shard (S,) fp32 of the mean.

        The method does not change the masters' gradients, but it changes the encoding errors of error feedback.  It is
        for checks between backward passes.  Such a check must restore the encoding errors afterwards.  All ranks must
        call the method.
        """
        reduction = self.collective
        key = self._clock.gradients(self._geometry.name, self._wire.mesh.rank) if self._draws else None
        reduction.start(gradient.to(self._dtype), key=key, errors=self.feedback())
        mean = reduction.finish()
        reduction.close()
        return mean

    def _take(self, mean: Tensor) -> None:
        """Set padding in ``mean`` (S,) to zero, and add ``mean`` to the masters' gradients, in the master shard.

        The masters are the fp32 weights that the optimizer steps.  If the wire (the object that sends all messages) has
        an observer, an object that looks at gradients, the observer gets the mean too.
        """
        for start, end in self._pads:
            mean[start:end] = 0
        if self._wire.observer is not None:
            rank = self._wire.mesh.rank
            (first, end), (low, _) = self._geometry.received_piece(rank), self._geometry.bounds(rank)
            self._wire.observer.averaged(self._geometry.name, first, mean[first - low : end - low])
        self._master_shard.take(mean)

    def drop(self) -> None:
        """Forget gradients whose reduction has not started, and the errors that error feedback carries to later steps.

        The state of a user's own reduction class is kept.
        """
        if self._opened is not None and self.progress is not Progress.FAILED:
            # The exchange is in the log of collectives already, so the other ranks wait for its message.
            self._opened.post()
            self._opened.wait()
            self._opened.close()
        self._forget()
        self.missing.clear()
        if self.progress < Progress.REDUCING:
            self.progress = Progress.COLLECTING
        # A user's own reduction keeps its state: it is often the same on all ranks, and others may not call drop().
        if self._errors is not None:
            self._errors.clear()

    def feedback(self) -> Errors | None:
        """Return the errors that earlier encodings have left; the reduction of this step adds them to gradients.

        Returns None if the present policy has no error feedback, or if the unit is frozen.
        """
        if self._feedback is None or not self._geometry.trainable:
            return None
        if self._errors is None:
            self._errors = Errors(self._feedback, self.collective.hops, self._wire.mesh.device)
            self._meter.add("feedback", self._errors.nbytes)
        self._errors.begin(self._clock.step)
        return self._errors

    def kept_errors(self) -> Errors | None:
        """Return the errors of earlier encodings that are kept for this step or for later steps (error feedback).

        Returns None if no errors are kept.  The present policy of a schedule may have no error feedback, while an
        earlier policy has left errors that a later policy will use.  These errors are returned too.
        """
        return self.feedback() if self._errors is None or self._feedback is not None else self._errors

    @property
    def remembers(self) -> bool:
        """Whether a user's own class reduces this unit's gradients and keeps a state from one reduction to the next."""
        return self.own is not None and bool(self.own.state())

    def clear_feedback(self) -> None:
        """Set the encoding errors of error feedback to zero; to be called on all ranks.

        If a user's own class reduces the gradients, its object is constructed anew.  The method is for steps whose
        gradients are not used, for example after an overflow.
        """
        if self._errors is not None:
            self._errors.clear()
        if self.own is not None:
            self.own.reset()

    def reset(self) -> None:
        """Forget everything that earlier reductions have left, so that the next one begins as in a new engine.

        The encoding errors of error feedback are set to zero.  If a user's own class reduces the gradients, its object
        is constructed anew.  To be called on all ranks.
        """
        if self._errors is not None:
            self._errors.reset()
        if self.own is not None:
            self.own.reset()


class _Way(NamedTuple):
    """The object that reduces a unit's gradient under one policy, with facts about the reduction.

    For example, the facts say whether a codec of the reduction rounds stochastically.
    """

    collective: Reduction | OwnReduction  # the object that reduces
    feedback: Feedback | None  # None: no errors are carried
    collects: bool  # whether gradients may be collected in the message of hop 1
    draws: bool  # whether a codec rounds stochastically
    pads: Sequence[tuple[int, int]]  # the parts of the mean to set to zero


def _keeps_zeros(codec: Codec) -> bool:
    """Return whether ``codec`` is known to return zeros as zeros after encoding and decoding.

    Casts do, and so do integer and floating-point codecs with scales but without offsets or rotation.  For all other
    codecs, such as users' codecs, the result is False.
    """
    return isinstance(codec, Raw) or (isinstance(codec, Blocked) and not (codec.asymmetric or codec.hadamard))
