"""Reduces one unit's local gradients to their mean over all ranks: hops, codecs, noise, error feedback.

What a unit hands over, and when; the hops are posted in :func:`impl.comm.reduce_scatter.reduce_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from impl.codecs.codec import Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.rounding_noise import Noise, apart
from impl.comm.error_feedback import Errors
from impl.comm.ledger import Tag
from impl.comm.reduce_scatter import Reduction, opened, reduced, replicated
from impl.comm.transfer import Steps
from impl.comm.wire import Exchange
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.topology import Axis
from impl.unit.context import UnitContext
from impl.unit.master_shard import MasterShard


class GradientReduction:
    """The reductions of one unit on one rank; the policy of ``context`` is this unit's own."""

    def __init__(self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard) -> None:
        policy, wire = context.policy, context.wire
        self._geometry, self._policy, self._wire = geometry, policy, wire
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

    def open_message(self, dtype: torch.dtype) -> Exchange | None:
        """The message in which gradients of ``dtype`` may be collected; None if they must be encoded."""
        if self._policy.reduce == "ring":
            return None
        return opened(self.how(), self._geometry.piece, dtype)

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


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero whatever else is in its block; of a user's own nobody knows."""
    if isinstance(codec, OwnCodec):
        return False
    if isinstance(codec, Raw | FloatCodec):
        return not codec.hadamard
    return not (codec.asymmetric or codec.hadamard)
