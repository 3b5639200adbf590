"""Bits by budget: which codec each part travels in, so that the sum of errors is least within a budget.

Pure: no torch.  A knapsack with one choice for each part, taken greedily: from the smallest codecs on, the
change that saves most error for a byte of those that still fit.  The result never exceeds the budget, and is
no worse than the best uniform choice within it.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
    """What a part costs in one codec: bytes on the wire, and the sum of its squared errors."""

    bytes: int
    error: float


def choose(parts: Sequence[Mapping[_Name, Cost]], budget: int) -> list[_Name]:
    """The codec of each part, by its name, within ``budget`` bytes of all; all parts have the same codecs.

    Raises ValueError: if even the smallest codecs take more, naming both.
    """
    chosen = [min(part, key=part.__getitem__) for part in parts]
    spent = total(parts, chosen).bytes
    if spent > budget:
        raise ValueError(f"a budget of {budget} bytes: the smallest codecs take {spent}")
    while steps := [
        (saved / more if more > 0 else math.inf, index, name, more)
        for index, part in enumerate(parts)
        for name, cost in part.items()
        if (saved := part[chosen[index]].error - cost.error) > 0
        and (more := cost.bytes - part[chosen[index]].bytes) <= budget - spent
    ]:
        _, index, chosen[index], more = max(steps, key=lambda step: step[0])  # of equal ones the first
        spent += more
    candidates = [chosen, *([name] * len(parts) for name in (parts[0] if parts else ()))]
    fitting = [one for one in candidates if total(parts, one).bytes <= budget]
    return min(fitting, key=lambda one: total(parts, one).error)


def total(parts: Sequence[Mapping[_Name, Cost]], chosen: Sequence[_Name]) -> Cost:
    """Bytes and error of all parts in the codecs that were chosen."""
    costs = [part[name] for part, name in zip(parts, chosen, strict=True)]
    return Cost(sum(one.bytes for one in costs), sum(one.error for one in costs))


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a budget for one purpose: all units' weight gathers, or reductions' hops between nodes."""

    purpose: Budgeted
    hop: str  # name of its axis; empty for gathers
    codecs: tuple[Codec, ...]  # to choose from, the policy's own first
    units: tuple[str, ...]  # names, in model order
    # by unit and codec: of a frame, as often as a step sends it between nodes
    bytes: tuple[tuple[int, ...], ...]
    limit: int  # bytes of all units together

    def chosen(self, errors: Sequence[Sequence[float]]) -> list[int]:
        """Number of the codec of each unit, from the errors (unit, codec) measured on all ranks."""
        parts = [dict(enumerate(map(Cost, *one))) for one in zip(self.bytes, errors, strict=True)]
        return choose(parts, self.limit)


def shares_of(policy: Policy, topology: Topology, units: Sequence[UnitGeometry]) -> list[Share]:
    """What the policy's budget chooses codecs for; nothing without one.

    ``units`` are in model order; frozen and persistent ones are left as they are.

    Raises PolicyError: if the policy's own codecs, in which training begins, take more than the budget.
    """
    kept, spared = kept_units(policy, units), policy.gather_axes(topology)[1]
    found = []
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
        own, bits = sum(size[0] for size in sizes), getattr(policy.budget, purpose)
        limit = int(bits * elements / 8) if bits else own
        if own > limit:
            raise PolicyError(
                f"budget '{policy.budget}' gives {purpose} {limit} bytes a rank, and {codecs[0]}, in which "
                f"training begins, takes {own}: begin with fewer bits"
            )
        hop = topology.node_axis.name if purpose == "gradients" else ""
        found.append(Share(purpose, hop, codecs, tuple(names), tuple(sizes), limit))
    return found


def at_most(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], sent: Mapping[LedgerKey, int]
) -> dict[Link, int]:
    """Bytes over each kind of link at most, whatever a budget chooses, from those ``sent`` in own codecs."""
    left, total = dict(sent), dict.fromkeys(get_args(Link), 0)
    for share in shares_of(policy, topology, units):
        own = {name: sizes[0] for name, sizes in zip(share.units, share.bytes, strict=True)}
        mine: dict[tuple[Link, str], int] = defaultdict(int)
        for key in sent:
            if key.purpose == share.purpose and key.unit in own and share.hop in ("", key.hop):
                mine[key.link, key.unit] += left.pop(key)
        for link in total:  # bytes that a link sends for a byte of the budget, at most
            ratios = [(nbytes, own[unit]) for (of, unit), nbytes in mine.items() if of == link]
            total[link] += max((-(-nbytes * share.limit // size) for nbytes, size in ratios), default=0)
    for key, nbytes in left.items():
        total[key.link] += nbytes
    return total
