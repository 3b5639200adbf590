"""Reduces one unit's local gradients to their mean over all ranks: hops, codecs, noise, error feedback.

The mirror of :mod:`impl.unit.weight_gather`: gradients are collected in :mod:`impl.unit.gradient_buffer`, the
queue of :mod:`impl.unit.reduction_queue` starts the reduction in its turn, the hops are posted in
:mod:`impl.comm.reduce_scatter`, and the mean ends in :mod:`impl.unit.master_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor, nn

from impl.codecs.codec import Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Key, apart
from impl.comm.error_feedback import Errors
from impl.comm.ledger import Tag
from impl.comm.reduce_scatter import Average, Reduction, Replicas
from impl.comm.reduction_observer import Observer
from impl.errors import ZeroError
from impl.plan.policy import Policy
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.topology import Axis
from impl.transport.side_stream import Arrival
from impl.unit.context import UnitContext
from impl.unit.gradient_buffer import GradientBuffer
from impl.unit.master_shard import MasterShard
from impl.unit.reduction_queue import Phase, checked

_INTERRUPTED: Final = (
    "a reduction that was interrupted cannot be finished: its gradients are lost on this rank; call "
    "drop_gradients(), finish_backward() and zero_grad(), and run the step anew"
)


class GradientReduction:
    """The reductions of one unit on one rank; the policy of ``context`` is this unit's own.

    Attributes:
        gradients: what this rank collected, and has not sent.
        how: along which hops it is reduced, with which codecs.
        missing: numbers of the members whose gradient has not arrived, while COLLECTING.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        context: UnitContext,
        master_shard: MasterShard,
        leaves: Sequence[nn.Parameter],
    ) -> None:
        policy, wire = context.policy, context.wire
        self._geometry, self._wire, self._passes = geometry, wire, context.passes
        self.phase = Phase.IDLE
        self.gradients = GradientBuffer(geometry, DTYPES[policy.compute], context.gradients, context.meter)
        self.missing: set[int] = set()
        self._leaves = leaves
        self._average: Average | None = None  # while REDUCING
        self._arrival: Arrival | None = None  # of what follows the first hop, beside a GPU's computation
        self._meter, self._clock, self._master_shard = context.meter, context.clock, master_shard
        self._errors: Errors | None = None  # of the gradient codecs, from the first reduction on
        self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Reduce as ``policy`` says from here on; what error feedback carries stays."""
        self._policy = policy
        geometry, wire = self._geometry, self._wire
        topology, rank = wire.mesh.topology, wire.mesh.rank
        hops, name = policy.reduce_axes(topology), geometry.name
        whole = geometry.shards == topology.world
        self.how = Reduction(
            wire=wire,
            hops=hops,
            tag=Tag("backward", "gradients", name),
            piece=geometry.piece,
            strides=() if whole else self._strides_of([axis for axis, _ in hops]),
            chunks=chunked(geometry.piece, policy.chunks, policy.grain),
            sums=policy.sums,
        )
        plain = policy.reduce != "ring" and policy.feedback is None and geometry.trainable
        self._collects = plain and self.how.collects(DTYPES[policy.compute])
        self._replicas: Replicas | None = None
        axes, codec = policy.replica_axes(topology)
        if axes:
            self._replicas = Replicas(axes=axes, codec=codec, strides=self._strides_of(axes))
        self._draws = any(codec.stochastic for codec in policy.gradients)
        # An offset, or a rotation, makes something of padding's zeros; it must not reach norms or weights.
        self._pads = () if all(map(_keeps_zeros, policy.gradients)) else geometry.pads(rank)

    def observe(self, observer: Observer | None) -> None:
        """Tell ``observer`` of reductions from here on, where the wire has none of its own."""
        self.how = replace(self.how, watcher=observer)

    def reserve(self) -> None:
        """Make room in shared memory for the largest messages."""
        slices = self._wire.mesh.topology.world
        for (axis, _), frames in zip(self.how.hops, self.how.frames, strict=True):
            self._wire.reserve(axis, slices * max(frames))
            slices //= axis.size

    def __repr__(self) -> str:
        missing = f", missing {sorted(self.missing)}" if self.missing else ""
        return f"GradientReduction({self._geometry.name!r}, {self.phase.name}{missing})"

    @property
    def elements(self) -> int:
        """Of its gradient, padding included."""
        return self._geometry.padded

    # Collecting

    def begin_collecting(self) -> None:
        """A backward pass will bring gradients: all are missing."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.COLLECTING
            self.missing = set(range(len(self._leaves)))

    def collect(self, number: int) -> bool:
        """Take the gradient that has just arrived at member ``number``; True when none is missing.

        Raises:
            ZeroError: if the unit was reduced in this pass already.
        """
        missing = self.missing
        if not missing:  # of a unit without a module's event
            self._refuse_started()
            self.begin_collecting()
            missing = self.missing
        if len(missing) == len(self._leaves):  # the first of its unit: all ranks' reductions are here
            self._passes.reductions.post_next_hops()
        if not self.gradients.held and not self._passes.accumulating:
            self._open()
        self.gradients.add(number, self._leaves[number], accumulating=self._passes.accumulating)
        missing.discard(number)
        if missing:
            return False
        self.end_collecting()
        return True

    def _refuse_started(self) -> None:
        """Refuse a gradient of a unit that this pass has reduced already."""
        if self.phase in _STARTED:
            raise ZeroError(
                f"a gradient arrived for unit {self._geometry.name!r}, which was already reduced in this "
                "backward pass: in reentrant checkpoints a parameter that is used twice brings its gradient "
                "in parts, so use_reentrant=False there"
            )

    def _open(self) -> None:
        """Collect in the message that is sent, if this unit is the next and frames are the elements."""
        if not self.how.hops and self._in_place:  # one rank: the mean is the gradient
            self.gradients.lie_at(self._master_shard.place())
        elif self._collects and self._passes.reductions.is_next(self):
            self.gradients.lie_in(self.how.open_message())

    def collect_outside(self, number: int, placeholder: nn.Parameter) -> None:
        """Take the gradient that arrived at a placeholder.

        An ``autograd.Function`` that was given the placeholder leads there.  Others of the parameter may be
        yet to come, so it stays missing; if none comes, the unit is reduced at the end of the pass.

        Raises:
            ZeroError: if the unit was reduced in this pass already.
        """
        self._refuse_started()
        self.begin_collecting()
        self.gradients.add(number, placeholder, accumulating=self._passes.accumulating)

    def end_collecting(self) -> None:
        """Nothing is missing any more, or will come."""
        self.missing.clear()
        self.phase = checked(self._geometry.name, self.phase, Phase.READY)

    def end_pass(self) -> None:
        """The backward pass is over; what it collected without reducing it stays."""
        self.missing.clear()
        self.phase = checked(self._geometry.name, self.phase, Phase.IDLE)

    # Reducing

    @property
    def _in_place(self) -> bool:
        """Whether the mean may be written where the masters' gradients lie."""
        shard = self._master_shard
        return self._replicas is None and not shard.placement.shard and shard.fresh

    def start(self) -> None:
        """Hand the gradient over, and post its first hop."""
        self.phase = checked(self._geometry.name, self.phase, Phase.REDUCING)
        try:
            self._average = Average(
                self.how,
                self._policy.reduce,
                self.gradients.whole(),
                key=self._key() if self._draws else None,
                errors=None if self._policy.feedback is None else self.feedback(),
                opened=self.gradients.opened,
                out=self._master_shard.place() if self._in_place else None,
                replicas=None if self._replicas is None else self._noisy_replicas(self._replicas),
            )
            self.gradients.forget()
            stream, self._arrival = self._wire.reductions, None
            if (
                stream is not None
                and not self._average.complete
                and not (self._wire.observer or self.how.watcher)
            ):
                with self._wire.beside(stream) as self._arrival:
                    self._take(self._average.finish())
        except BaseException:
            self.phase = Phase.FAILED
            raise
        if self._average.complete and self._arrival is None:
            self.finish()

    def post_next_hop(self) -> None:
        """Post the next hop's message; after the last hop inside a node, take the mean.

        After a last hop that crosses nodes nothing is left to post, and the wait for the slowest link is left
        to :meth:`finish` ([Note: deferred last hop] in :mod:`impl.comm.reduce_scatter`).

        Raises:
            ZeroError: if it was interrupted.
        """
        self._check_whole()
        if self._average is not None and self._arrival is None:
            try:
                self._average.post_next_hop()
            except BaseException:
                self.phase = Phase.FAILED
                raise
            if self._average.complete:
                self.finish()

    def finish(self) -> None:
        """Wait until the mean is in this rank's shard.

        Raises:
            ZeroError: if it was interrupted.
        """
        self._check_whole()
        if self._average is not None:
            try:
                if self._arrival is None:
                    self._take(self._average.finish())
                else:
                    self._wire.join(self._arrival)  # until then the average holds its memory
            except BaseException:
                self.phase = Phase.FAILED
                raise
            self._average = None
            self.phase = checked(self._geometry.name, self.phase, Phase.REDUCED)

    def _check_whole(self) -> None:
        if self.phase is Phase.FAILED:
            raise ZeroError(_INTERRUPTED)

    def _take(self, mean: Tensor) -> None:
        """Let this rank's shard take ``mean`` (S,)."""
        for start, end in self._pads:
            mean[start:end] = 0
        if self._wire.observer is not None:
            rank = self._wire.mesh.rank
            first, end = self._geometry.received_piece(rank)
            low, _ = self._geometry.bounds(rank)
            self._wire.observer.averaged(self._geometry.name, first, mean[first - low : end - low])
        self._master_shard.take(mean)

    def drop(self) -> None:
        """Forget what was collected and not reduced, and the errors that codecs carry."""
        self.gradients.drop(post=self.phase is not Phase.FAILED)
        self._average = None if self.phase is Phase.FAILED else self._average
        self.missing.clear()
        if self.phase in (Phase.COLLECTING, Phase.READY):
            self.phase = Phase.IDLE
        self.clear_feedback()

    def _key(self) -> Key:
        """Of stochastic codecs, with this rank as the source."""
        return self._clock.gradients(self._geometry.name, self._wire.mesh.rank)

    def _noisy_replicas(self, replicas: Replicas) -> Replicas:
        """How the mean goes to the other groups now: a stochastic codec draws anew each time."""
        if not replicas.codec.stochastic:
            return replicas
        rank, piece = self._wire.mesh.rank, self._geometry.piece
        number = self._geometry.bounds(rank)[0] // piece + rank // self._geometry.shards
        return replace(
            replicas, noise=replace(self._key(), hop=len(self.how.hops)).noise(number * apart(piece))
        )

    def _strides_of(self, axes: Sequence[Axis]) -> list[int]:
        """Along each axis, pieces of the shard from one rank's to its neighbour's."""
        return [self._geometry.piece_stride(axis.stride) for axis in axes]

    def feedback(self) -> Errors | None:
        """The errors that this step's reduction starts with; None without feedback, or frozen."""
        if self._policy.feedback is None or not self._geometry.trainable:
            return None
        if self._errors is None:
            mesh = self._wire.mesh
            self._errors = Errors.zero(self._policy, mesh.topology, self._geometry.piece, mesh.device)
            assert self._errors is not None  # noqa: S101  # there is feedback
            self._meter.add("feedback", self._errors.nbytes)
        self._errors.begin(self._clock.step)
        return self._errors

    def clear_feedback(self) -> None:
        """Forget the errors of the gradient codecs: the gradients they belong to are not used."""
        if self._errors is not None:
            self._errors.clear()

    def feedback_state(self) -> dict[str, Tensor]:
        """The errors of the gradient codecs, to be loaded again."""
        errors = self.feedback()
        return {} if errors is None else errors.state()


_STARTED: Final = (Phase.REDUCING, Phase.REDUCED, Phase.FAILED)


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero whatever else is in its block; of a user's own nobody knows."""
    if isinstance(codec, OwnCodec):
        return False
    if isinstance(codec, Raw | FloatCodec):
        return not codec.hadamard
    return not (codec.asymmetric or codec.hadamard)
