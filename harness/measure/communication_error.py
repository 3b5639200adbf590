"""Measures what was communicated in one step against what should have been, where it happens.

Reduced gradients are compared with the fp64 mean of all ranks' fp32 gradients, sent past the wire; gathered
weights of the next rank's shard with that rank's own fp32 master.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harness.records.trial_record import Communicated, CommunicationError
from impl import ops
from impl.comm.wire import Hop, Observer
from impl.plan.policy import Policy
from impl.unit.unit import Unit
from impl.zero import Zero

GROWTH: Final = 8.0  # of an error from the first measured step on; without a fault at most 4.4 so far
BF16_VNMSE: Final = 2.0e-5  # of a cast to bf16, at most: 2^-16, and a little
REPEATED: Final = 8  # reductions of the same gradients, where each may come out otherwise


class Place(NamedTuple):
    """Where an error arises; named as in :class:`~harness.records.trial_record.CommunicationError`."""

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None
    axis: str = ""
    codec: str = ""
    repeated: int = 1


Sums = NDArray[np.float64]
"""A rank's sums of squared errors and of squared values, then of products of ranks' gradients, if any."""
SumsByPlace = dict[Place, Sums]


class ReductionObserver(Observer):
    """Adds up the errors of one rank's hops, and its gradients and means."""

    def __init__(self) -> None:
        self.hops: dict[tuple[str, Hop], Any] = defaultdict(float)  # sums by unit and hop
        self.gradients: dict[str, Tensor] = {}  # by unit, (P,) fp32 sum over the reductions
        self.means: dict[str, tuple[int, Tensor]] = {}  # by unit, first element and (n,) fp32 sum

    def local(self, unit: str, gradient: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        total = gradient.detach().to(torch.float32, copy=True)
        self.gradients[unit] = total.add_(self.gradients[unit]) if unit in self.gradients else total

    def encoded(self, unit: str, hop: Hop, values: Tensor, frames: Tensor | None) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        exact = values.detach().float()
        decoded = exact
        if frames is not None:
            decoded = torch.empty(exact.shape, device=exact.device)
            ops.decode(hop.codec, frames.view(*exact.shape[:-1], -1), decoded)
        self.hops[unit, hop] += squared_sums(decoded, exact)

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        total = mean.detach().clone()
        self.means[unit] = (start, total.add_(self.means[unit][1]) if unit in self.means else total)


def squared_sums(decoded: Tensor, exact: Tensor) -> Sums:
    """Sums of squared errors and of squared exact values of two tensors of equal shape, in fp64."""
    exact = exact.double()
    return np.array([float((decoded.double() - exact).square().sum()), float(exact.square().sum())])


def gradient_errors(step: int, observer: ReductionObserver, *, repeated: int = 1) -> SumsByPlace:
    """Errors of each hop, and end to end, of ``repeated`` reductions; all ranks must call it."""
    errors: SumsByPlace = {}
    if repeated == 1:
        for (unit, hop), sums in observer.hops.items():
            errors[Place(step, "gradients", unit, hop.number, hop.axis, str(hop.codec))] = sums
    for unit, (start, mean) in observer.means.items():
        rows = exchange_gradients(observer.gradients[unit], start, mean.numel()).double()  # (world, n)
        products = (rows @ rows.T).flatten().cpu().numpy()
        place = Place(step, "gradients", unit, repeated=repeated)
        errors[place] = np.concatenate([squared_sums(mean, rows.mean(0)), products])
    return errors


def exchange_gradients(gradient: Tensor, start: int, numel: int) -> Tensor:
    """(world, n) fp32 elements of all ranks' gradients (P,) from ``start`` on; all ranks must call it."""
    starts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(starts, start)
    sent = torch.stack([gradient[first : first + numel] for first in starts])
    rows = torch.empty_like(sent)
    dist.all_to_all_single(rows, sent)
    return rows


def weight_errors(step: int, zero: Zero) -> SumsByPlace:
    """Errors of each unit's gathered weights, and again of hpZ's secondary; all ranks must call it."""
    errors: SumsByPlace = {}
    for unit in zero.units:
        master = unit.master_shard.master.detach().contiguous()
        masters = [torch.empty_like(master) for _ in range(dist.get_world_size())]
        dist.all_gather(masters, master)
        for purpose in ("weights", "secondary") if unit.policy.secondary else ("weights",):
            unit.all_gather("forward" if purpose == "weights" else "backward")
            place = Place(step, purpose, unit.geometry.name, codec=str(unit.policy.weights))
            errors[place] = squared_sums(*_next_rank_weights(unit, masters))
            unit.reshard()
    return errors


def _next_rank_weights(unit: Unit, masters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The next rank's shard as this rank gathered it, and in its master (S,), both without padding."""
    geometry, mesh = unit.geometry, unit.wire.mesh
    rank = (mesh.rank + 1) % mesh.topology.world
    gathered, exact = [], []
    for member, slot in zip(unit.members, geometry.slots, strict=True):
        begin, end = geometry.overlap(slot, rank)
        flat = member.parameter.detach().reshape(-1)
        gathered.append(flat[begin - slot.offset : end - slot.offset].float())
        exact.append(masters[rank][slice(*geometry.part(slot, rank))])
    return torch.cat(gathered), torch.cat(exact)


def combine(ranks: Sequence[Mapping[Place, Sequence[float] | Sums]]) -> list[CommunicationError]:
    """Add up the sums of all ranks, by unit and over all units; leave out places where all values are 0."""
    totals: dict[Place, Any] = defaultdict(float)
    for rank in ranks:
        for place, sums in rank.items():
            totals[place] += np.asarray(sums)
            totals[place._replace(unit="")] += np.asarray(sums)
    return [_error(place, sums) for place, sums in sorted(totals.items(), key=_order) if sums[1] != 0]


def refusal(errors: Sequence[CommunicationError], policy: Policy) -> str | None:
    """A sentence on the first error that no codec makes by itself; None if there is none.

    Errors end to end grow at most by :data:`GROWTH` from the first measured step on, and hpZ's copy errs as
    what it copies, plus its own rounding.  Carried errors, budgets and first differences are not judged.
    """
    rounding = BF16_VNMSE if policy.copy_codec not in (policy.weights, policy.inside) else 0.0
    ends = [
        (error, error.squared_error / error.squared_value)
        for error in errors
        if (error.hop, error.repeated) == (None, 1)
        and error.squared_error is not None
        and error.squared_value
    ]
    weights = {(e.step, e.unit, e.codec): vnmse for e, vnmse in ends if e.purpose == "weights"}
    first: dict[tuple[str, str, str], float] = {}
    for error, vnmse in ends:
        copied = weights.get((error.step, error.unit, error.codec), math.inf)
        units = error.unit or "all units"
        sentence = f"in step {error.step} {error.purpose} of {units} err by a vNMSE of {vnmse:.3g}"
        if error.purpose == "secondary" and vnmse > 1.001 * copied + rounding:
            return f"{sentence}, and what they are copies of by {copied:.3g}"
        gradients = error.purpose == "gradients"
        budgeted = ("gradients" if gradients else "weights") in policy.candidates
        differs = policy.differences is not None and error.step == 0
        if budgeted or (policy.feedback is not None if gradients else differs):
            continue
        allowed = GROWTH * max(first.setdefault((error.purpose, error.unit, error.codec), vnmse), BF16_VNMSE)
        if vnmse > allowed:
            return f"{sentence}: more than {allowed:.3g}, as by the first step that was measured"
    return None


def _order(entry: tuple[Place, Sums]) -> tuple[object, ...]:
    step, purpose, unit, hop, *rest = entry[0]
    return step, purpose, unit, hop is None, hop or 0, *rest


def _error(place: Place, sums: Sums) -> CommunicationError:
    error, value = sums[:2].tolist() if np.isfinite(sums[:2]).all() else (None, None)
    cosine = mean_cosine(sums[2:]) if len(sums) > 2 else None
    return CommunicationError(**place._asdict(), squared_error=error, squared_value=value, cosine=cosine)


def mean_cosine(products: NDArray[np.float64]) -> float | None:
    """Mean cosine of all pairs of ranks' gradients, from all (world ** 2,) products; None without a pair."""
    rows = products.reshape(math.isqrt(len(products)), -1)
    squares = np.outer(rows.diagonal(), rows.diagonal())
    pairs = np.tril((squares > 0) & np.isfinite(squares), -1)
    return float((rows[pairs] / np.sqrt(squares[pairs])).mean()) if pairs.any() else None


def outcomes_differ(policy: Policy) -> bool:
    """Whether reductions of the same gradients differ; if so, the error of their sum is measured too."""
    codecs = (*policy.gradients, *policy.candidates.get("gradients", ()))
    return policy.feedback is not None or any(codec.stochastic for codec in codecs)


def measured_steps(total: int) -> frozenset[int]:
    """The first, a middle and the last of ``total`` optimizer steps, by index."""
    return frozenset({0, total // 2, total - 1})
