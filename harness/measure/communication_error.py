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

from harness.records.record import Communicated, CommunicationError
from impl import ops
from impl.comm.wire import Hop, Observer
from impl.plan.policy import Policy
from impl.unit.unit import Unit
from impl.zero import Zero

GROWTH: Final = 8.0  # of an error from the first measured step on; without a fault at most 4.4 so far
OF_BF16: Final = 2.0e-5  # vNMSE of a cast to bf16, at most, 2^-16, and a little
REPEATED: Final = 8  # reductions of the same gradients, where each may come out otherwise


class Place(NamedTuple):
    """Where an error arises; named as in :class:`~harness.records.record.CommunicationError`."""

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None
    axis: str = ""
    codec: str = ""
    repeated: int = 1


Sums = NDArray[np.float64]
"""A rank's sums of squared errors and of squared values, then of products of ranks' gradients, if any."""
Found = dict[Place, Sums]


class Observed(Observer):
    """What one rank is told of reductions: an :class:`impl.comm.wire.Observer`."""

    def __init__(self) -> None:
        self.hops: dict[tuple[str, Hop], Any] = defaultdict(float)  # sums by unit and hop
        self.gradients: dict[str, Tensor] = {}  # by unit, (P,) fp32 sum over the reductions
        self.means: dict[str, tuple[int, Tensor]] = {}  # by unit, first element and (n,) fp32 sum

    def local(self, unit: str, gradient: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        found = gradient.detach().to(torch.float32, copy=True)
        self.gradients[unit] = found.add_(self.gradients[unit]) if unit in self.gradients else found

    def encoded(self, unit: str, hop: Hop, values: Tensor, frames: Tensor | None) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        exact = values.detach().float()
        decoded = exact
        if frames is not None:
            decoded = torch.empty(exact.shape, device=exact.device)
            ops.decode(hop.codec, frames.view(*exact.shape[:-1], -1), decoded)
        self.hops[unit, hop] += compared(decoded, exact)

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """See :class:`~impl.comm.wire.Observer`."""
        found = mean.detach().clone()
        self.means[unit] = (start, found.add_(self.means[unit][1]) if unit in self.means else found)


def compared(found: Tensor, exact: Tensor) -> Sums:
    """Sums over the elements of two tensors of equal shape, in fp64."""
    exact = exact.double()
    return np.array([float((found.double() - exact).square().sum()), float(exact.square().sum())])


def of_gradients(step: int, observed: Observed, *, repeated: int = 1) -> Found:
    """Errors of each hop, and end to end, of ``repeated`` reductions; all ranks must call it."""
    found: Found = {}
    if repeated == 1:
        for (unit, hop), sums in observed.hops.items():
            found[Place(step, "gradients", unit, hop.number, hop.axis, str(hop.codec))] = sums
    for unit, (start, mean) in observed.means.items():
        rows = of_all_ranks(observed.gradients[unit], start, mean.numel()).double()  # (world, n)
        products = (rows @ rows.T).flatten().cpu().numpy()
        place = Place(step, "gradients", unit, repeated=repeated)
        found[place] = np.concatenate([compared(mean, rows.mean(0)), products])
    return found


def of_all_ranks(gradient: Tensor, start: int, numel: int) -> Tensor:
    """(world, n) fp32 elements of all ranks' gradients (P,) from ``start`` on; all ranks must call it."""
    starts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(starts, start)
    sent = torch.stack([gradient[first : first + numel] for first in starts])
    rows = torch.empty_like(sent)
    dist.all_to_all_single(rows, sent)
    return rows


def of_weights(step: int, zero: Zero) -> Found:
    """Errors of what is gathered of each unit, and again of hpZ's secondary; all ranks must call it."""
    found: Found = {}
    for unit in zero.units:
        mine = unit.master_shard.master.detach().contiguous()
        masters = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(masters, mine)
        for purpose in ("weights", "secondary") if unit.policy.secondary else ("weights",):
            unit.all_gather("forward" if purpose == "weights" else "backward")
            place = Place(step, purpose, unit.geometry.name, codec=str(unit.policy.weights))
            found[place] = compared(*_of_next_rank(unit, masters))
            unit.reshard()
    return found


def _of_next_rank(unit: Unit, masters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What this rank gathered of the next rank's shard, and of its master (S,) the same: padding left out."""
    geometry, mesh = unit.geometry, unit.wire.mesh
    rank = (mesh.rank + 1) % mesh.topology.world
    gathered, exact = [], []
    for member, slot in zip(unit.members, geometry.slots, strict=True):
        first, end = geometry.overlap(slot, rank)
        flat = member.parameter.detach().reshape(-1)
        gathered.append(flat[first - slot.offset : end - slot.offset].float())
        exact.append(masters[rank][slice(*geometry.part(slot, rank))])
    return torch.cat(gathered), torch.cat(exact)


def errors_of(ranks: Sequence[Mapping[Place, Sequence[float] | Sums]]) -> list[CommunicationError]:
    """Combine the sums of all ranks, by unit and of all units; where all values are 0 is no error."""
    whole: dict[Place, Any] = defaultdict(float)
    for rank in ranks:
        for place, sums in rank.items():
            whole[place] += np.asarray(sums)
            whole[place._replace(unit="")] += np.asarray(sums)
    return [_error(place, sums) for place, sums in sorted(whole.items(), key=_order) if sums[1] != 0]


def refusal(errors: Sequence[CommunicationError], policy: Policy) -> str | None:
    """Why what was sent in a later step errs as its codec cannot, in words; None if nothing is wrong.

    Errors end to end grow at most by :data:`GROWTH` from the first measured step on, and hpZ's copy errs as
    what it copies, but for its own rounding.  Not judged are carried errors, budgets, and first differences.
    """
    rounding = OF_BF16 if policy.copy_codec not in (policy.weights, policy.inside) else 0.0
    ends = [
        (error, error.squared_error / error.squared_value)
        for error in errors
        if error.hop is None
        and error.repeated == 1
        and error.squared_error is not None
        and error.squared_value
    ]
    weights = {(e.step, e.unit, e.codec): vnmse for e, vnmse in ends if e.purpose == "weights"}
    first: dict[tuple[str, str, str], float] = {}
    for error, found in ends:
        copied = weights.get((error.step, error.unit, error.codec), math.inf)
        where = error.unit or "all units"
        what = f"in step {error.step} {error.purpose} of {where} err by a vNMSE of {found:.3g}"
        if error.purpose == "secondary" and found > 1.001 * copied + rounding:
            return f"{what}, and what they are copies of by {copied:.3g}"
        of_gradients = error.purpose == "gradients"
        budgeted = ("gradients" if of_gradients else "weights") in policy.candidates
        differs = policy.differences is not None and error.step == 0
        if budgeted or (policy.feedback is not None if of_gradients else differs):
            continue
        allowed = GROWTH * max(first.setdefault((error.purpose, error.unit, error.codec), found), OF_BF16)
        if found > allowed:
            return f"{what}: more than {allowed:.3g}, as by the first step that was measured"
    return None


def _order(item: tuple[Place, Sums]) -> tuple[object, ...]:
    place, _ = item
    end = place.hop is None
    return place.step, place.purpose, place.unit, end, place.hop or 0, place.axis, place.codec, place.repeated


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
    """Whether reductions of the same gradients differ: then the error of their sum is measured too."""
    codecs = (*policy.gradients, *policy.candidates.get("gradients", ()))
    return policy.feedback is not None or any(codec.stochastic for codec in codecs)


def measured_steps(total: int) -> frozenset[int]:
    """The first, a middle and the last of ``total`` optimizer steps, by index."""
    return frozenset({0, total // 2, total - 1})
