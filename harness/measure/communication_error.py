"""Measures the errors of communicated gradients and weights in one step, for each unit and each hop.

Each reduced gradient is compared with the fp64 mean of all ranks' fp32 gradients, which are exchanged outside the
wire for this purpose.  Gathered weights are compared with the fp32 master of the rank that owns them; each rank
checks the shard of the next rank.  Errors are kept as sums of squares, so that ranks and units can be added up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.cluster import all_ranks
from harness.records.trial_record import Communicated, CommunicationError
from harness.workloads.dataset import draw
from impl import ops
from impl.codecs.codec import OwnCodec, Raw
from impl.codecs.reference import REFERENCE
from impl.comm.wire import EncodedHop, Observer
from impl.policy.own_method import MethodUnit
from impl.policy.policy import Policy
from impl.unit.unit import Unit
from impl.zero import Zero

# Largest factor by which an error may grow after the first measured step, on up to 16 ranks; in the committed records
# it is 5.4 at most there.
GROWTH: Final = 8.0
BF16_VNMSE: Final = 2.0e-5  # largest vNMSE of a cast to bf16: 2^-16, rounded up
_LEAST_ERROR: Final = 0.5  # gathered weights must have at least this share of their codec's squared error
REPEATED: Final = 8  # number of reductions of the same gradients, where each reduction has another error


class Place(NamedTuple):
    """Where an error was measured; fields are those of :class:`~harness.records.trial_record.CommunicationError`."""

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None
    axis: str = ""
    codec: str = ""
    repeated: int = 1


Sums = NDArray[np.float64]
"""A rank's sum of squared errors and sum of squared values, (2,).

For whole reductions, the world ** 2 inner products of the ranks' gradients follow, (2 + world ** 2,).
"""
SumsByPlace = dict[Place, Sums]


class ReductionObserver(Observer):
    """Observes the reductions of one rank: sums the errors of each hop, and keeps gradients and means.

    Args:
        unit: The only unit to observe; None for all.  Messages of a single unit are compared with what the reference
            backend encodes, and the errors of its hops are not measured.
    """

    def __init__(self, unit: str | None = None) -> None:
        self._unit = unit
        self.hops: dict[tuple[str, EncodedHop], Any] = defaultdict(float)  # Sums by unit and hop
        self.gradients: dict[str, Tensor] = {}  # by unit: (P,) fp32 local gradient, summed over reductions
        # By unit: number of the first element of this rank's part, and the (n,) fp32 mean, summed over reductions.
        self.means: dict[str, tuple[int, Tensor]] = {}
        # If only one unit is observed: what is wrong with the first message that differs from the reference's encoding.
        self.unlike: str | None = None

    def local(self, unit: str, gradient: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        if self._unit not in (None, unit):
            return
        total = gradient.detach().to(torch.float32, copy=True)
        self.gradients[unit] = total.add_(self.gradients[unit]) if unit in self.gradients else total

    def encoded(self, unit: str, hop: EncodedHop, values: Tensor, frames: Tensor | None) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        if self._unit not in (None, unit):
            return
        exact = values.detach().float()
        decoded = exact
        if self._unit is not None:
            # An error of 0 stands for what is not measured: only the hop counts, by which its codec is checked.  The
            # sum of exact values must not be 0, since combine() would leave the hop out.
            self.hops[unit, hop] = np.array([0.0, 1.0])
            if frames is not None and self.unlike is None:
                self.unlike = _unlike_reference(unit, hop, exact, frames)
            return
        if frames is not None:
            decoded = torch.empty(exact.shape, device=exact.device)
            ops.decode(hop.codec, frames.view(*exact.shape[:-1], -1), decoded)
        self.hops[unit, hop] += squared_sums(decoded, exact)

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        if self._unit not in (None, unit):
            return
        total = mean.detach().clone()
        self.means[unit] = (start, total.add_(self.means[unit][1]) if unit in self.means else total)


def _unlike_reference(unit: str, hop: EncodedHop, values: Tensor, frames: Tensor) -> str | None:
    """Return how a message differs from what the reference backend encodes.

    None if both are equal, or if the codec permits a difference.
    """
    codec = hop.codec
    if codec.stochastic or isinstance(codec, OwnCodec):
        # A stochastic codec's noise depends on the message, and is not known here.  A user's codec has the same code on
        # every backend.
        return None
    rows = values.reshape(-1, values.shape[-1]).cpu()
    expected = torch.zeros(len(rows), codec.frame_bytes(rows.shape[-1]), dtype=torch.uint8)
    REFERENCE.encode(codec, rows, expected)
    differ = int((expected.view(-1) != frames.reshape(-1).cpu()).sum())
    if not differ:
        return None
    return (
        f"{differ} of {expected.numel()} bytes that were sent as {codec} in hop {hop.number} for the gradient of unit "
        f"{unit!r} are not what the reference of {codec} encodes"
    )


def squared_sums(decoded: Tensor, exact: Tensor) -> Sums:
    """Return the fp64 sums of squared errors and of squared exact values of two tensors of equal shape."""
    exact = exact.double()
    error = decoded.to(torch.float64, copy=True).sub_(exact).square_().sum()
    return np.array([float(error), float(exact.square().sum())])


def gradient_errors(
    step: int, observer: ReductionObserver, *, repeated: int = 1, group: slice = slice(None)
) -> SumsByPlace:
    """Return the errors of each hop and of the whole reduction; all ranks must call this.

    Args:
        step: Index of the step.
        observer: The observer of the reductions.
        repeated: How often the same gradients were reduced.  If more than once, the error of the mean over these
            reductions is returned, and errors of hops are left out.
        group: The ranks over which gradients are averaged, this rank's group with local steps; all by default.
    """
    errors: SumsByPlace = {}
    if repeated == 1:
        for (unit, hop), sums in observer.hops.items():
            errors[Place(step, "gradients", unit, hop.number, hop.axis, str(hop.codec))] = sums
    for unit, (start, mean) in observer.means.items():
        every = exchange_gradients(observer.gradients[unit], start, mean.numel())  # (world, n)
        rows = every[group].double()
        products = (rows @ rows.T).flatten().cpu().numpy()
        place = Place(step, "gradients", unit, repeated=repeated)
        errors[place] = np.concatenate([squared_sums(mean, rows.mean(0)), products])
    return errors


def exchange_gradients(gradient: Tensor, start: int, numel: int) -> Tensor:
    """Exchange gradients so that each rank has all ranks' values of its own part; all ranks must call this.

    Args:
        gradient: (P,) fp32, this rank's whole gradient.
        start: Number of the first element of this rank's part.
        numel: Elements of a part, the same on all ranks.

    Returns:
        (world, numel) fp32: a row for each rank.
    """
    starts = all_ranks.gather_objects(start)
    return all_ranks.swap(torch.stack([gradient[first : first + numel] for first in starts]))


def weight_errors(step: int, zero: Zero, only: str | None = None) -> SumsByPlace:
    """Return the errors of each unit's gathered weights, and of hpZ's copy; all ranks must call this.

    If ``only`` names a unit, only the errors of this unit are returned.
    """
    errors: SumsByPlace = {}
    for unit in zero.units:
        if only not in (None, unit.geometry.name):
            continue
        # An offloaded master is in host memory, but its gathered weights are on the device.
        master = unit.master_shard.master.detach().to(unit.wire.mesh.device).contiguous()
        masters = all_ranks.gather(master)
        for purpose in ("weights", "secondary") if unit.policy.secondary else ("weights",):
            unit.all_gather("forward" if purpose == "weights" else "backward")
            codec = str(unit.policy.weights) if unit.policy.own_gather is None else ""
            place = Place(step, purpose, unit.geometry.name, codec=codec)
            errors[place] = squared_sums(*_next_rank_weights(unit, masters))
            unit.reshard()
    return errors


def gathered_weights(zero: Zero) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gather all weights as for a forward pass, and as for a backward pass; all ranks must call this.

    Call this function in a rehearsal, since a user's own gather may have a state.

    Returns:
        (weights of forward passes, weights of backward passes), each in fp32 by the parameter's name.
    """
    by_phase: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for unit in zero.units:
        for phase, values in zip(("forward", "backward"), by_phase, strict=True):
            unit.all_gather("forward" if phase == "forward" else "backward")
            for member, slot in zip(unit.members, unit.geometry.slots, strict=True):
                values[slot.spec.name] = member.parameter.detach().float().clone()
            unit.reshard()
    return by_phase


def beyond_bound(zero: Zero, gathered: Mapping[str, Tensor]) -> str | None:
    """Return an error if weights that a user's own gather has ``gathered`` first differ from the masters by more than
    its class promises; else None.  All ranks must call this; each checks the shard of the next rank.
    """
    own, rank = zero.policy.own_gather, (zero.wire.mesh.rank + 1) % zero.wire.mesh.topology.world
    found = None
    for unit in zero.units if own is not None else ():
        masters, geometry = all_ranks.gather(unit.master_shard.master.detach().contiguous()), unit.geometry
        if unit.policy.own_gather is None or found is not None:
            continue
        exact, method_unit = masters[rank], MethodUnit.of(geometry, rank)
        rounding = torch.finfo(unit.flat.dtype).eps + 1e-4
        allowed = (unit.policy.own_gather.error_bound(method_unit) + rounding) * float(exact.abs().max())
        for slot in geometry.slots:
            begin, end = geometry.overlap(slot, rank)
            mine = gathered[slot.spec.name].reshape(-1)[begin - slot.offset : end - slot.offset]
            error = (mine - exact[slice(*geometry.part(slot, rank))]).abs()
            if error.numel() and float(error.max()) > allowed:
                found = (
                    f"before training the weights of unit {geometry.name!r} that {own} has gathered differ from the "
                    f"masters of rank {rank} by {float(error.max()):.3g}: more than the class promises, {allowed:.3g}"
                )
    return found


def too_exact(step: int, zero: Zero, only: str, error: Sums) -> str | None:
    """Return an error if a unit's gathered weights are closer to the masters than their codec allows; else None.

    Such weights did not pass through the codec.  All ranks must call this.

    Args:
        step: Index of the step.
        zero: The engine.
        only: Name of the unit.
        error: This rank's sums from :func:`weight_errors`, which concern the next rank's shard.
    """
    (unit,) = (unit for unit in zero.units if unit.geometry.name == only)
    codec = unit.policy.weights
    policy = zero.current_policy
    other = policy.differences is not None or policy.budget is not None or unit.policy.planes != 1
    other = other or unit.policy.own_gather is not None
    if isinstance(codec, Raw | OwnCodec) or codec.stochastic or other:
        return None  # the masters were not sent in exactly this codec
    master = unit.master_shard.master.detach().contiguous().cpu()
    frame = torch.zeros(codec.frame_bytes(master.numel()), dtype=torch.uint8)
    decoded = torch.empty_like(master)
    REFERENCE.encode(codec, master, frame)
    REFERENCE.decode(codec, frame, decoded)
    own = torch.from_numpy(squared_sums(decoded, master))
    sums = torch.stack([own, torch.from_numpy(error[:2])]).view(-1)
    all_ranks.add(sums := sums.to(unit.master_shard.master.device))
    expected, found = float(sums[0]), float(sums[2])
    if found >= _LEAST_ERROR * expected:
        return None
    return (
        f"in step {step} the weights of {only} were gathered with a squared error of {found:.3g}, but {codec} makes "
        f"a squared error of {expected:.3g}: the weights were not sent in this codec"
    )


def _next_rank_weights(unit: Unit, masters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the next rank's shard as this rank gathered it, and its exact values from ``masters``.

    ``masters`` are the (S,) fp32 shards of all ranks; padding is left out of both results.
    """
    geometry, mesh = unit.geometry, unit.wire.mesh
    rank = (mesh.rank + 1) % mesh.topology.world
    if unit.policy.local_steps is not None:  # other groups have other weights
        first = mesh.rank - mesh.rank % geometry.shards
        rank = first + (mesh.rank + 1 - first) % geometry.shards
    gathered, exact = [], []
    for member, slot in zip(unit.members, geometry.slots, strict=True):
        begin, end = geometry.overlap(slot, rank)
        flat = member.parameter.detach().reshape(-1)
        gathered.append(flat[begin - slot.offset : end - slot.offset].float())
        exact.append(masters[rank][slice(*geometry.part(slot, rank))])
    return torch.cat(gathered), torch.cat(exact)


def combine(ranks: Sequence[Mapping[Place, Sequence[float] | Sums]]) -> list[CommunicationError]:
    """Add up the sums of all ranks for each unit, and over all units as unit ``""``.

    Places where all exact values are 0 are left out, since no relative error is defined there.
    """
    totals: dict[Place, Any] = defaultdict(float)
    for rank in ranks:
        for place, sums in rank.items():
            totals[place] += np.asarray(sums)
            totals[place._replace(unit="")] += np.asarray(sums)
    return [_error(place, sums) for place, sums in sorted(totals.items(), key=_order) if sums[1] != 0]


def growth(ranks: int) -> float:
    """Return the largest factor by which an error may grow after the first measured step.

    Quantisation errors are in proportion to the mean of the squares of the ranks' gradients, and are given relative to
    the square of their mean.  As training goes on, the gradients of single ranks resemble each other less, so that the
    quotient of the two grows: from 1, if they are equal, to at most the number of ranks.  Half of this is allowed, and
    never less than :data:`GROWTH`.  Without a fault the factor was 4.1 on 4 ranks, 5.4 on 16, and 8.8 on 128.
    """
    return max(GROWTH, ranks / 2)


def refusal(errors: Sequence[CommunicationError], policy: Policy, ranks: int) -> str | None:
    """Return a sentence on the first error that is larger than a correct engine's can be; None if there is none.

    Two rules are checked on whole reductions and gathers.  First, an error grows at most by the factor :func:`growth`
    after the first measured step.  Second, the error of hpZ's copy is at most the error of the copied weights, plus the
    copy's own rounding.  The first rule does not apply to gradients with error feedback or a user's own reduction, to
    weights with a user's own gather, to codecs that a budget changes, and to the first step of differences, since these
    errors may grow.  With a schedule, it applies to the steps of one policy, and to no differences.  The second does
    not apply to a copy that holds another plane than the forward pass computes with.
    """
    ends = [
        (error, error.squared_error / error.squared_value)
        for error in errors
        if (error.hop, error.repeated) == (None, 1)
        and error.squared_error is not None
        and error.squared_value
    ]
    weights = {(e.step, e.unit, e.codec): vnmse for e, vnmse in ends if e.purpose == "weights"}
    first: dict[tuple[Policy, str, str, str], float] = {}
    for error, vnmse in ends:
        now = policy.policy_at(error.step)
        rounding = BF16_VNMSE if now.copy_codec not in (now.weights, now.inside) else 0.0
        copied = weights.get((error.step, error.unit, error.codec), math.inf)
        units = error.unit or "all units"
        sentence = f"in step {error.step} the vNMSE of {error.purpose} of {units} is {vnmse:.3g}"
        if error.purpose == "secondary" and policy.planes == 1 and vnmse > 1.001 * copied + rounding:
            return f"{sentence}, but the vNMSE of the copied weights is {copied:.3g}"
        gradients = error.purpose == "gradients"
        budgeted = ("gradients" if gradients else "weights") in now.candidates
        differs = now.differences is not None and (error.step == 0 or bool(policy.schedule))
        differs = differs or now.own_gather is not None
        carries = now.feedback is not None or now.own_reduce is not None
        if budgeted or (carries if gradients else differs):
            continue
        key = now, error.purpose, error.unit, error.codec
        allowed = growth(ranks) * max(first.setdefault(key, vnmse), BF16_VNMSE)
        if vnmse > allowed:
            return (
                f"{sentence}, but after the error in the first measured step at most {allowed:.3g} is allowed"
            )
    return None


def _order(entry: tuple[Place, Sums]) -> tuple[object, ...]:
    step, purpose, unit, hop, *rest = entry[0]
    return step, purpose, unit, hop is None, hop or 0, *rest


def _error(place: Place, sums: Sums) -> CommunicationError:
    error, value = sums[:2].tolist() if np.isfinite(sums[:2]).all() else (None, None)
    cosine = mean_cosine(sums[2:]) if len(sums) > 2 else None
    return CommunicationError(**place._asdict(), squared_error=error, squared_value=value, cosine=cosine)


def mean_cosine(products: NDArray[np.float64]) -> float | None:
    """Return the mean cosine over all pairs of ranks, from the (world ** 2,) inner products of their gradients.

    Pairs with a gradient that is zero or not finite are left out; returns None if no pair remains.
    """
    rows = products.reshape(math.isqrt(len(products)), -1)
    squares = np.outer(rows.diagonal(), rows.diagonal())
    pairs = np.tril((squares > 0) & np.isfinite(squares), -1)
    return float((rows[pairs] / np.sqrt(squares[pairs])).mean()) if pairs.any() else None


def outcomes_differ(policy: Policy) -> bool:
    """Return whether two reductions of the same gradients may differ.

    They may differ because of error feedback, of random rounding, or of the state of a user's own reduction.
    If so, the error of the mean of :data:`REPEATED` reductions is measured too.
    """
    codecs = (*policy.gradients, *policy.candidates.get("gradients", ()))
    if policy.own_reduce is not None:
        return True
    return policy.feedback is not None or any(codec.stochastic for codec in codecs)


def measured_steps(total: int) -> frozenset[int]:
    """Return the indices of the steps to measure: the first, the middle and the last of ``total``."""
    return frozenset({0, total // 2, total - 1})


def drawn_step(seed: int, repeat: int, warmup: int, total: int) -> int | None:
    """Return the step, in the second half of a trial and after its warm-up, before which every trial is checked.

    ``seed`` and ``repeat`` determine the step, so that the repeats of a suite check different steps.  A fault that
    begins in the course of training is present in late steps, which is why early ones are not drawn.

    Returns:
        The index of the step; None if no step of a trial of ``total`` steps lies after the first and the warm-up.
    """
    first = max(warmup, 1, total // 2)
    return None if first >= total else first + draw(f"{seed}/{repeat}/checked step", total - first)
