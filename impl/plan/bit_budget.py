"""Bits by budget: chooses the codec of each part so that the sum of errors is least within a budget.

Pure: no torch.  A knapsack with one choice for each part, taken greedily: from the smallest codecs on, the
fitting change that saves most error per byte.  The choice is no worse than the best uniform one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

from impl.codecs.codec import Codec
from impl.plan.policy import Budgeted, Policy, PolicyError
from impl.plan.prefetch_schedule import kept_units
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.topology import Topology
from impl.plan.traffic import LedgerKey, Link

_Name = TypeVar("_Name")


class Cost(NamedTuple):
    """The cost of a part in one codec: bytes on the wire, and the sum of its squared errors."""

    bytes: int
    error: float


def choose(parts: Sequence[Mapping[_Name, Cost]], budget: int) -> list[_Name]:
    """The codec's name for each part, within ``budget`` bytes in all; all parts have the same codecs.

    Raises ValueError: if even the smallest codecs take more, naming both numbers.
    """
    chosen = [min(part, key=part.__getitem__) for part in parts]
    spent = total(parts, chosen).bytes
    if spent > budget:
        raise ValueError(f"a budget of {budget} bytes: the smallest codecs take {spent}")
    while steps := [
        (saved / extra if extra > 0 else math.inf, index, name, extra)
        for index, part in enumerate(parts)
        for name, cost in part.items()
        if (saved := part[chosen[index]].error - cost.error) > 0
        and (extra := cost.bytes - part[chosen[index]].bytes) <= budget - spent
    ]:
        _, index, chosen[index], extra = max(steps, key=lambda step: step[0])  # of equal ones the first
        spent += extra
    candidates = [chosen, *([name] * len(parts) for name in (parts[0] if parts else ()))]
    fitting = [names for names in candidates if total(parts, names).bytes <= budget]
    return min(fitting, key=lambda names: total(parts, names).error)


def total(parts: Sequence[Mapping[_Name, Cost]], chosen: Sequence[_Name]) -> Cost:
    """Bytes and error of all parts in the chosen codecs."""
    costs = [part[name] for part, name in zip(parts, chosen, strict=True)]
    return Cost(sum(cost.bytes for cost in costs), sum(cost.error for cost in costs))


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a budget for one purpose: all units' weight gathers, or reductions' hops between nodes."""

    purpose: Budgeted
    hop: str  # name of its axis; empty for gathers
    codecs: tuple[Codec, ...]  # to choose from, the policy's own first
    units: tuple[str, ...]  # names, in model order
    bytes: tuple[tuple[int, ...], ...]  # of a step's frames between nodes, by unit and codec
    limit: int  # bytes of all units together

    def choose(self, errors: Sequence[Sequence[float]]) -> list[int]:
        """The index of each unit's codec, from the errors (unit, codec) measured on all ranks."""
        parts = [dict(enumerate(map(Cost, *costs))) for costs in zip(self.bytes, errors, strict=True)]
        return choose(parts, self.limit)


def shares_of(policy: Policy, topology: Topology, units: Sequence[UnitGeometry]) -> list[Share]:
    """The shares of the policy's budget; none without one.

    ``units`` are in model order; frozen and persistent ones keep their codecs.

    Raises PolicyError: if the policy's own codecs, which training begins with, take more than the budget.
    """
    kept, spared = kept_units(policy, units), policy.gather_axes(topology)[1]
    shares = []
    for purpose, codecs in policy.candidates.items():
        names, sizes, elements = [], [], 0
        for index, unit in enumerate(units):
            if not unit.trainable or unit.persistent:
                continue
            times, pieces = 1, [unit.shard]
            if purpose == "gradients":
                pieces = [end - start for start, end in chunked(unit.piece, policy.chunks, policy.grain)]
            elif policy.stage == 3 and not spared and index not in kept:
                times = 2  # forward and backward
            names.append(unit.name)
            sizes.append(tuple(times * sum(map(codec.frame_bytes, pieces)) for codec in codecs))
            elements += times * sum(pieces)
        if not names:
            raise PolicyError(f"budget '{policy.budget}': all units are frozen or persistent; choose nothing")
        initial, bits = sum(size[0] for size in sizes), getattr(policy.budget, purpose)
        limit = int(bits * elements / 8) if bits else initial
        if initial > limit:
            raise PolicyError(
                f"budget '{policy.budget}' gives {purpose} {limit} bytes a rank, and {codecs[0]}, in which "
                f"training begins, takes {initial}: begin with fewer bits"
            )
        hop = topology.node_axis.name if purpose == "gradients" else ""
        shares.append(Share(purpose, hop, codecs, tuple(names), tuple(sizes), limit))
    return shares


def at_most(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], sent: Mapping[LedgerKey, int]
) -> dict[Link, int]:
    """Most bytes over each kind of link under any choice, from those ``sent`` in the policy's own codecs."""
    left, totals = dict(sent), dict.fromkeys(get_args(Link), 0)
    for share in shares_of(policy, topology, units):
        sizes = {name: candidates[0] for name, candidates in zip(share.units, share.bytes, strict=True)}
        shared = {link: Counter[str]() for link in totals}  # bytes by unit
        for key in sent:
            if key.purpose == share.purpose and key.unit in sizes and share.hop in ("", key.hop):
                shared[key.link][key.unit] += left.pop(key)
        # At most all of the budget goes to the unit that sends each byte most often.
        for link, counts in shared.items():
            most = (-(-nbytes * share.limit // sizes[unit]) for unit, nbytes in counts.items())
            totals[link] += max(most, default=0)
    for key, nbytes in left.items():
        totals[key.link] += nbytes
    return totals
