"""Reduces one unit's local gradients to their mean over all ranks: hops, codecs, noise, error feedback.

The mirror of :mod:`impl.unit.weight_gather`: gradients are collected in :mod:`impl.unit.gradient_buffer`, the
queue of :mod:`impl.unit.reduction_queue` starts the reduction in its turn, the hops are posted in
:mod:`impl.comm.reduce_scatter`, and the mean ends in :mod:`impl.unit.master_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor, nn

from impl.codecs.codec import Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Noise, apart
from impl.comm.error_feedback import Errors
from impl.comm.ledger import Tag
from impl.comm.reduce_scatter import Reduction, opened, reduced, replicated
from impl.comm.transfer import Steps, Transfer
from impl.comm.wire import Exchange
from impl.errors import ZeroError
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.topology import Axis
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
        missing: numbers of the members whose gradient has not arrived, while COLLECTING.
    """

    def __init__(self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard) -> None:
        policy, wire = context.policy, context.wire
        self._geometry, self._policy, self._wire, self._passes = geometry, policy, wire, context.passes
        self.phase = Phase.IDLE
        self.gradients = GradientBuffer(geometry, DTYPES[policy.compute], context.gradients, context.meter)
        self.missing: set[int] = set()
        self._members = frozenset(range(len(geometry.slots)))
        self._transfer: Transfer | None = None  # while REDUCING
        self._meter, self._clock, self._master_shard = context.meter, context.clock, master_shard
        topology, rank = wire.mesh.topology, wire.mesh.rank
        self._hops = policy.reduce_axes(topology)
        self._replicas = policy.replica_axes(topology)
        whole = geometry.shards == topology.world
        self._strides = None if whole else self._strides_of([axis for axis, _ in self._hops])
        self._chunks = chunked(geometry.piece, policy.chunks, policy.grain)
        self._draws = any(codec.stochastic for codec in policy.gradients)
        self._tag = Tag("backward", "gradients", geometry.name)
        self._errors: Errors | None = None  # of the gradient codecs, from the first reduction on
        # An offset, or a rotation, makes something of padding's zeros; it must not reach norms or weights.
        self._pads = () if all(map(_keeps_zeros, policy.gradients)) else geometry.pads(rank)

    def reserve(self) -> None:
        """Make room in shared memory for the largest messages."""
        slices = self._wire.mesh.topology.world
        for axis, codec in self._hops:
            largest = max(codec.frame_bytes(end - start) for start, end in self._chunks)
            self._wire.reserve(axis, slices * largest)
            slices //= axis.size

    def __repr__(self) -> str:
        missing = f", missing {sorted(self.missing)}" if self.missing else ""
        return f"GradientReduction({self._geometry.name!r}, {self.phase.name}{missing})"

    @property
    def elements(self) -> int:
        """Of its gradient, padding included."""
        return self._geometry.padded

    @property
    def started(self) -> bool:
        """Whether this pass's gradient was handed over: no more can be added."""
        return self.phase in _STARTED

    @property
    def begun(self) -> bool:
        """Whether a gradient of this pass has arrived at a member."""
        return self.phase in _BEGUN and len(self.missing) < len(self._members)

    # Collecting

    def begin_collecting(self) -> None:
        """A backward pass will bring gradients: all are missing."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.COLLECTING
            self.missing = set(self._members)

    def collect(self, number: int, leaf: nn.Parameter) -> bool:
        """Take the gradient of member ``number`` from ``leaf``; True when none is missing.

        If this unit is the next to be reduced its message is opened now and, where frames are the elements
        themselves, collects them in place.
        """
        self.begin_collecting()
        passes, gradients = self._passes, self.gradients
        if not gradients.held and not passes.accumulating and passes.reductions.is_next(self):
            self._open_message()
        gradients.add(number, leaf, accumulating=passes.accumulating)
        self.missing.discard(number)
        if not self.missing:
            self.end_collecting()
        return not self.missing

    def collect_outside(self, number: int, placeholder: nn.Parameter) -> None:
        """Take the gradient that arrived at a placeholder.

        An ``autograd.Function`` that was given the placeholder leads there.  Others of the parameter may be
        yet to come, so it stays missing; if none comes, the unit is reduced at the end of the pass.
        """
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

    def _open_message(self) -> None:
        """Collect in the message of the first hop, where gradients need not be encoded."""
        if self._policy.reduce != "ring":
            message = opened(self.how(), self._geometry.piece, DTYPES[self._policy.compute])
            if message is not None:
                self.gradients.lie_in(message)

    # Reducing

    def start(self) -> None:
        """Hand the gradient over, and post its first hop."""
        self.phase = checked(self._geometry.name, self.phase, Phase.REDUCING)
        try:
            steps = self.reducing(self.gradients.whole(), self.gradients.opened)
            self._transfer = Transfer(steps, "reduction")
        except BaseException:
            self.phase = Phase.FAILED
            raise
        self.gradients.forget()
        if self._transfer.complete:
            self.phase = Phase.REDUCED

    def post_next_hop(self) -> None:
        """Post the next hop's message; after the last hop inside a node, take the mean.

        After a last hop that crosses nodes nothing is left to post, and the wait for the slowest link is left
        to :meth:`finish`.

        Raises:
            ZeroError: if it was interrupted.
        """
        self._go_on(Transfer.proceed)

    def finish(self) -> None:
        """Wait until the mean is in this rank's shard.

        Raises:
            ZeroError: if it was interrupted.
        """
        self._go_on(Transfer.wait)

    def _go_on(self, how: Callable[[Transfer], None]) -> None:
        if self.phase is Phase.FAILED:
            raise ZeroError(_INTERRUPTED)
        if self.phase is Phase.REDUCING and self._transfer is not None:
            try:
                how(self._transfer)
            except BaseException:
                self.phase = Phase.FAILED
                raise
            if self._transfer.complete:
                self.phase, self._transfer = Phase.REDUCED, None

    def drop(self) -> None:
        """Forget what was collected and not reduced, and the errors that codecs carry."""
        self.gradients.drop(post=self.phase is not Phase.FAILED)
        self.missing.clear()
        if self.phase in (Phase.COLLECTING, Phase.READY):
            self.phase = Phase.IDLE
        self.clear_feedback()

    def reducing(self, gradient: Tensor, message: Exchange | None) -> Steps[None]:
        """Average ``gradient`` (padded,), and let this rank's shard take the mean.

        Args:
            gradient: of this rank.
            message: in which it lies already, of :meth:`open_message`.
        """
        axes, codec = self._replicas
        master_shard = self._master_shard
        in_place = master_shard.fresh and not axes and not master_shard.placement.shard
        how = self.how(message, master_shard.place() if in_place else None, goes_on=bool(axes))
        mean = yield from reduced(how, self._policy.reduce, gradient)
        if axes:
            noise, strides = self._replica_noise(how, codec), self._strides_of(axes)
            mean = yield from replicated(
                self._wire, axes, codec, how.tag, mean, strides=strides, noise=noise, hop=len(how.hops)
            )
        for start, end in self._pads:
            mean[start:end] = 0
        if self._wire.observer is not None:
            rank = self._wire.mesh.rank
            first, end = self._geometry.received_piece(rank)
            low, _ = self._geometry.bounds(rank)
            self._wire.observer.averaged(self._geometry.name, first, mean[first - low : end - low])
        master_shard.take(mean)

    def how(
        self, message: Exchange | None = None, out: Tensor | None = None, *, goes_on: bool = False
    ) -> Reduction:
        """How the gradient is reduced now."""
        return Reduction(
            wire=self._wire,
            hops=self._hops,
            tag=self._tag,
            strides=self._strides,
            chunks=self._chunks,
            key=self._clock.gradients(self._geometry.name, self._wire.mesh.rank) if self._draws else None,
            errors=self.feedback(),
            opened=message,
            out=out,
            goes_on=goes_on,
        )

    def _replica_noise(self, how: Reduction, codec: Codec) -> Noise | None:
        """Random bits of this rank's mean on its way to the other groups."""
        if not codec.stochastic or how.key is None:
            return None
        rank, piece = self._wire.mesh.rank, self._geometry.piece
        number = self._geometry.bounds(rank)[0] // piece + rank // self._geometry.shards
        return replace(how.key, hop=len(how.hops)).noise(number * apart(piece))

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


_BEGUN: Final = frozenset((Phase.COLLECTING, Phase.READY))
_STARTED: Final = frozenset((Phase.REDUCING, Phase.REDUCED, Phase.FAILED))


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero whatever else is in its block; of a user's own nobody knows."""
    if isinstance(codec, OwnCodec):
        return False
    if isinstance(codec, Raw | FloatCodec):
        return not codec.hadamard
    return not (codec.asymmetric or codec.hadamard)
