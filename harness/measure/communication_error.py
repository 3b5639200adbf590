"""Measures, in one step, the errors of reduced gradients and gathered weights, for each unit and each hop.

A unit is a set of parameters that are sent together, and a hop is one exchange of a reduction.

- Reduced gradients are compared with the exact mean in fp64 of the ranks' fp32 gradients.  To compute this mean, ranks
  exchange their gradients uncompressed, in messages that are not counted.  With local steps, gradients are averaged
  only inside a state group (ranks that keep equal weights), and so is the exact mean.
- Gathered weights are compared with the fp32 master weights.  Each rank compares one shard: that of the next rank.

Errors are stored as sums of squares, so that they can be added up over ranks and units.
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

# Largest factor by which an error may grow after the first measured step, on up to 16 ranks.  In the committed records
# of up to 16 ranks, no error grows by more than a factor of 5.4.
GROWTH: Final = 8.0
BF16_VNMSE: Final = 2.0e-5  # largest vNMSE of a cast to bf16: 2^-16, rounded up
_LEAST_ERROR: Final = 0.5  # gathered weights must have at least this share of their codec's squared error
REPEATED: Final = 8  # number of reductions of the same gradients, where each reduction has another error


class Place(NamedTuple):
    """Identifies a measured error by its step, its purpose (such as ``weights``), its unit and its hop.

    A unit is a set of parameters that are sent together.  A hop is one exchange of a reduction; it is None for the
    error of a whole reduction or gather.  The fields have the same meaning as the fields of
    :class:`~harness.records.trial_record.CommunicationError`.
    """

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None
    axis: str = ""
    codec: str = ""
    repeated: int = 1


Sums = NDArray[np.float64]
"""A rank's sum of squared errors and its sum of squared exact values, (2,).

For a whole reduction among n ranks, the n ** 2 inner products of these ranks' gradients are appended: (2 + n ** 2,).
"""
SumsByPlace = dict[Place, Sums]


class ReductionObserver(Observer):
    """Collects, while this rank reduces gradients, the local gradients, the mean gradients and the errors of each hop.

    A hop is one exchange of a reduction.

    Args:
        unit: None to observe all units.  If it is the name of a unit (a set of parameters that are reduced together),
            only this unit is observed.  Its messages are then compared byte by byte with the reference backend's
            encoding, and the errors of hops are not measured.
    """

    def __init__(self, unit: str | None = None) -> None:
        self._unit = unit
        self.hops: dict[tuple[str, EncodedHop], Any] = defaultdict(float)  # Sums by unit and hop
        self.gradients: dict[str, Tensor] = {}  # by unit: (P,) fp32 local gradient, summed over reductions
        # By unit: (number of the first element, mean gradient (n,) fp32) of this rank's part, summed over reductions.
        self.means: dict[str, tuple[int, Tensor]] = {}
        # A sentence on the first message that differs from the reference's encoding; only if one unit is observed.
        self.unlike: str | None = None

    def local(self, unit: str, gradient: Tensor) -> None:
        """Add this rank's gradient (P,) of a unit to ``gradients``; called when a reduction of the unit begins."""
        if self._unit not in (None, unit):
            return
        total = gradient.detach().to(torch.float32, copy=True)
        self.gradients[unit] = total.add_(self.gradients[unit]) if unit in self.gradients else total

    def encoded(self, unit: str, hop: EncodedHop, values: Tensor, frames: Tensor | None) -> None:
        """Add a message's error to the errors of its hop or, if only one unit is observed, check the message's bytes.

        Args:
            unit: Name of the unit whose gradients are sent.
            hop: The hop (exchange) of the reduction in which the message is sent.
            values: (..., n) exact values of the message.
            frames: (..., F) uint8, the encoded values; None if the values are sent without encoding.
        """
        if self._unit not in (None, unit):
            return
        exact = values.detach().float()
        decoded = exact
        if self._unit is not None:
            # The hop's error is not measured.  An entry is made all the same, since it shows which codec the hop used.
            # Its sum of exact values is not 0, since combine() would leave the entry out.
            self.hops[unit, hop] = np.array([0.0, 1.0])
            if frames is not None and self.unlike is None:
                self.unlike = _unlike_reference(unit, hop, exact, frames)
            return
        if frames is not None:
            decoded = torch.empty(exact.shape, device=exact.device)
            ops.decode(hop.codec, frames.view(*exact.shape[:-1], -1), decoded)
        self.hops[unit, hop] += squared_sums(decoded, exact)

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """Add the mean gradient (n,) fp32 of a unit's elements [start, start + n) to ``means``."""
        if self._unit not in (None, unit):
            return
        total = mean.detach().clone()
        self.means[unit] = (start, total.add_(self.means[unit][1]) if unit in self.means else total)


def _unlike_reference(unit: str, hop: EncodedHop, values: Tensor, frames: Tensor) -> str | None:
    """Return a sentence if a message differs from the reference backend's encoding; None if all bytes are equal.

    The sentence says how many bytes differ.  Messages of a stochastic codec, and of a user's own codec, are not
    compared, and None is returned.

    Args:
        unit: Name of the unit, for the sentence.
        hop: The hop that the message belongs to.
        values: (..., n) fp32 values that were encoded.
        frames: (..., F) uint8, the encoding that was sent.
    """
    codec = hop.codec
    if codec.stochastic or isinstance(codec, OwnCodec):
        # A stochastic codec's random bits depend on the message, and are not known here.  A user's codec runs the same
        # code on every backend, so there is nothing to compare it with.
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
    """Return (2,) fp64: the sum of the squared errors ``(decoded - exact) ** 2``, and the sum of ``exact ** 2``.

    Both tensors have the same shape.
    """
    exact = exact.double()
    error = decoded.to(torch.float64, copy=True).sub_(exact).square_().sum()
    return np.array([float(error), float(exact.square().sum())])


def gradient_errors(
    step: int, observer: ReductionObserver, *, repeated: int = 1, group: slice = slice(None)
) -> SumsByPlace:
    """Return the errors of this rank's reduced gradients: for each unit, those of the whole reduction and of each hop.

    A unit is a set of parameters that are reduced together, and a hop is one exchange of a reduction.  All ranks must
    call this.

    Args:
        step: Index of the step.
        observer: The observer that collected the gradients while this rank reduced them.
        repeated: How often the same gradients were reduced.  If more than once, the mean of the results is compared
            with the exact mean gradient, and no errors of hops are returned.
        group: The ranks over which gradients are averaged: by default all ranks.  With local steps, pass the ranks of
            this rank's state group (the ranks that keep equal weights).

    Returns:
        A dict.  Each key (:class:`Place`) stands for a whole reduction or for one hop.  Each value (:data:`Sums`)
        begins with the sum of squared errors and the sum of squared exact values.
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
    """Fetch the local gradients of all ranks for this rank's part of a unit; all ranks must call this.

    Args:
        gradient: (P,) fp32, this rank's local gradient of the whole unit.
        start: Index of the first element of this rank's part.
        numel: Number of elements of a part, the same on all ranks.

    Returns:
        (world, numel) fp32; row r has rank r's gradient of the elements [start, start + numel).
    """
    starts = all_ranks.gather_objects(start)
    return all_ranks.swap(torch.stack([gradient[first : first + numel] for first in starts]))


def weight_errors(step: int, zero: Zero, only: str | None = None) -> SumsByPlace:
    """All-gather each unit's weights, and return their squared errors against the fp32 master weights.

    All ranks must call this.  Each rank compares only one shard of the gathered weights: it compares the next rank's
    shard with the next rank's master weights.  With hpZ, each unit is gathered a second time, from the secondary copy
    (hpZ's copy of the weights inside a node).  The errors of this second gather have the purpose ``secondary`` in the
    result.  If ``only`` names a unit, only this unit is gathered.
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
    """Gather all weights twice, as for a forward pass and as for a backward pass; all ranks must call this.

    Each gather may change the state of a user's own gather.  Therefore call this only in a rehearsal
    (:mod:`harness.reference_checks`), after which the engine's state is restored.

    Returns:
        Two dicts from the parameter's name to its fp32 weights: the weights of forward passes, and the weights of
        backward passes.
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
    """Return a sentence if a user's own gather broke the error bound that its class promises; else None.

    All ranks must call this.  Each rank compares the next rank's shard in ``gathered`` with the next rank's masters
    (the fp32 weights that the optimizer steps).  If the policy has no gather of the user's own, None is returned.

    Args:
        zero: The engine.
        gathered: fp32 weights by the parameter's name, as the user's gather returned them before training.
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
                    f"masters of rank {rank} by {float(error.max()):.3g}: its error_bound() allows {allowed:.3g}"
                )
    return found


def too_exact(step: int, zero: Zero, only: str, error: Sums) -> str | None:
    """Return a sentence if a unit's gathered weights are closer to the masters than the codec allows; else None.

    Masters are the fp32 weights that the optimizer steps.  This check finds weights that were sent in fp32 although the
    policy asks for a lossy codec.  For comparison, the masters are encoded and decoded here.  Weights are too close if
    their squared error is less than half of the squared error of these decoded masters.  Both errors are summed over
    all ranks.  All ranks must call this.

    In these cases the two errors are not compared, and None is returned:

    - the policy sends differences of weights, has a bit budget, or has ``planes`` other than 1;
    - the gather or the codec is the user's own;
    - the codec is stochastic or a cast.

    Args:
        step: Index of the step.
        zero: The engine.
        only: Name of the unit.
        error: This rank's sums for the unit and the purpose ``weights``, from :func:`weight_errors`.
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
    """Return the next rank's shard of the weights as this rank gathered it, and the exact values of the same elements.

    Both tensors are flat fp32 tensors without padding.  With local steps, only the ranks of a state group have equal
    weights, so the next rank is taken from this rank's state group.

    Args:
        unit: A unit whose weights are gathered now.
        masters: For each rank, its fp32 master weights (S,), which are the exact values.
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
    """Add up the sums of all ranks, and return one error for each :class:`Place` (step, purpose, unit and hop).

    For each step, purpose and hop there is also an error over all units together; its unit is ``""``.  Places whose
    exact values are all 0 are left out, since their relative error is not defined.
    """
    totals: dict[Place, Any] = defaultdict(float)
    for rank in ranks:
        for place, sums in rank.items():
            totals[place] += np.asarray(sums)
            totals[place._replace(unit="")] += np.asarray(sums)
    return [_error(place, sums) for place, sums in sorted(totals.items(), key=_order) if sums[1] != 0]


def growth(ranks: int) -> float:
    """Return the largest factor by which a correct engine's vNMSE may grow after the first measured step.

    The vNMSE (relative squared error) of a reduction is its squared error, divided by the square of the exact mean
    gradient.  The factor is half the number of ranks, but at least :data:`GROWTH`.

    The vNMSE grows even without a fault, because the ranks' gradients become less alike in training.  Let A be the mean
    over ranks of the squared gradients, and B the square of the mean gradient.  The squared error is proportional to A,
    and the vNMSE therefore to A / B.  If all ranks have the same gradient, A / B is 1.  If the gradients of n ranks are
    orthogonal, A / B is n.  In runs without a fault, the vNMSE grew by a factor of 4.1 on 4 ranks, 5.4 on 16 ranks and
    8.8 on 128 ranks.
    """
    return max(GROWTH, ranks / 2)


def refusal(errors: Sequence[CommunicationError], policy: Policy, ranks: int) -> str | None:
    """Return a sentence on the first measured error that a correct engine cannot have; None if there is no such error.

    Two rules check the vNMSE (relative squared error) of whole reductions and gathers.  Errors of single hops are not
    checked.

    Rule 1: a later vNMSE is at most :func:`growth` times the vNMSE of the first measured step.  If this first vNMSE is
    below :data:`BF16_VNMSE`, :data:`BF16_VNMSE` is used in its place.  With a schedule, only steps with the same policy
    are compared.  Rule 1 is not applied where a correct engine's error may grow by a larger factor:

    - gradients with error feedback or a user's own reduction;
    - weights with a user's own gather;
    - weights or gradients whose codecs a bit budget changes;
    - weights of a policy that sends differences of weights, in step 0.  Step 0 sends the weights themselves, so the
      next measured step counts as the first.  If the policy also has a schedule, rule 1 is not applied to its weights
      in any step.

    Rule 2: the vNMSE of hpZ's secondary copy (its copy of the weights inside a node) is bounded by the two causes of
    the copy's error.  These are the error of the weights that were copied, and the rounding of the copy.  By the
    triangle inequality, ``sqrt(C) <= sqrt(W) + sqrt(R)``.  C is the vNMSE of the copy, W the vNMSE of the copied
    weights, and R the vNMSE that rounding alone causes.  Equality occurs if both errors point in the same direction, as
    in the almost equal weights of a LayerNorm.  Rule 2 is not applied with ``planes`` other than 1, because the copy is
    then quantised along columns, but the weights of forward passes along rows.
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
        most = (math.sqrt(1.001 * copied) + math.sqrt(rounding)) ** 2
        if error.purpose == "secondary" and policy.planes == 1 and vnmse > most:
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
            return f"{sentence}: more than {allowed:.3g}, the limit that follows from the first measured step"
    return None


def _order(entry: tuple[Place, Sums]) -> tuple[object, ...]:
    step, purpose, unit, hop, *rest = entry[0]
    return step, purpose, unit, hop is None, hop or 0, *rest


def _error(place: Place, sums: Sums) -> CommunicationError:
    error, value = sums[:2].tolist() if np.isfinite(sums[:2]).all() else (None, None)
    cosine = mean_cosine(sums[2:]) if len(sums) > 2 else None
    return CommunicationError(**place._asdict(), squared_error=error, squared_value=value, cosine=cosine)


def mean_cosine(products: NDArray[np.float64]) -> float | None:
    """Return the mean cosine similarity of the gradients of all pairs of ranks.

    ``products`` has the inner products of all ranks' gradients: (n ** 2,) for n ranks.  Pairs with a gradient that is
    zero or not finite are left out.  Returns None if no pair remains.
    """
    rows = products.reshape(math.isqrt(len(products)), -1)
    squares = np.outer(rows.diagonal(), rows.diagonal())
    pairs = np.tril((squares > 0) & np.isfinite(squares), -1)
    return float((rows[pairs] / np.sqrt(squares[pairs])).mean()) if pairs.any() else None


def outcomes_differ(policy: Policy) -> bool:
    """Return whether two reductions of the same gradients may give different means.

    They may differ if the policy has error feedback, a stochastic codec for gradients, or a user's own reduction.  For
    such a policy, the harness makes one more measurement in the last measured step: it reduces the same gradients
    :data:`REPEATED` times, and measures the error of the mean of the results.
    """
    codecs = (*policy.gradients, *policy.candidates.get("gradients", ()))
    if policy.own_reduce is not None:
        return True
    return policy.feedback is not None or any(codec.stochastic for codec in codecs)


def measured_steps(total: int) -> frozenset[int]:
    """Return the indices of the steps in which errors are measured, for a trial of ``total`` steps.

    These are ``{0, total // 2, total - 1}``.
    """
    return frozenset({0, total // 2, total - 1})


def drawn_step(seed: int, repeat: int, warmup: int, total: int) -> int | None:
    """Choose at random the step before which :mod:`harness.reference_checks` checks the engine's messages.

    ``seed`` and ``repeat`` determine the choice, so that repeats of a trial may check different steps.  The step lies
    in the second half of the trial's ``total`` steps, because a fault that begins during training shows in late steps.
    The step also lies after the ``warmup`` steps and after step 0.

    Returns:
        The index of the step; None if the trial has no such step.
    """
    first = max(warmup, 1, total // 2)
    return None if first >= total else first + draw(f"{seed}/{repeat}/checked step", total - first)
