"""Chooses a codec for each unit: all messages together fit into a budget of bytes, and the sum of errors is smallest.

This is a multiple-choice knapsack, solved greedily.  Every unit starts in its smallest codec.  Then, as long as the
change of some unit's codec reduces the error and fits into the rest of the budget, the change that reduces the error
most for each additional byte is made.  The result is never worse than the best choice of one codec for all units.

:func:`shares_of` derives the budget in bytes from a policy, :class:`Share` chooses from measured errors, and
:func:`at_most` bounds the traffic of any choice.

Pure: no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

from impl.codecs.codec import Codec
from impl.plan.prefetch_schedule import kept_units
from impl.plan.traffic import LedgerKey, Link
from impl.policy.policy import Budgeted, Policy, PolicyError
from impl.policy.shard_layout import UnitGeometry, chunked
from impl.policy.topology import Topology

_Name = TypeVar("_Name")


class Cost(NamedTuple):
    """The cost of one part (a unit's messages) in one codec: bytes sent, and the sum of squared errors."""

    bytes: int
    error: float


def choose(parts: Sequence[Mapping[_Name, Cost]], budget: int) -> list[_Name]:
    """Returns, for each part, the name of the codec chosen for it; all parts together take at most ``budget`` bytes.

    For each part, ``parts`` holds the cost in each codec; all parts have the same codecs.

    Raises ValueError: if the smallest codecs take more than ``budget``, naming both numbers.
    """
    chosen = [min(part, key=part.__getitem__) for part in parts]
    spent = total(parts, chosen).bytes
    if spent > budget:
        raise ValueError(
            f"a budget of {budget} bytes is too small: the smallest codecs take {spent} bytes; allow at least "
            f"{spent} bytes"
        )
    while steps := [
        (saved / extra if extra > 0 else math.inf, index, name, extra)
        for index, part in enumerate(parts)
        for name, cost in part.items()
        if (saved := part[chosen[index]].error - cost.error) > 0
        and (extra := cost.bytes - part[chosen[index]].bytes) <= budget - spent
    ]:
        _, index, chosen[index], extra = max(steps, key=lambda step: step[0])  # the first of equal steps
        spent += extra
    candidates = [chosen, *([name] * len(parts) for name in (parts[0] if parts else ()))]
    fitting = [names for names in candidates if total(parts, names).bytes <= budget]
    return min(fitting, key=lambda names: total(parts, names).error)


def total(parts: Sequence[Mapping[_Name, Cost]], chosen: Sequence[_Name]) -> Cost:
    """Returns the bytes and the error of all parts together in the chosen codecs."""
    costs = [part[name] for part, name in zip(parts, chosen, strict=True)]
    return Cost(sum(cost.bytes for cost in costs), sum(cost.error for cost in costs))


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a budget for one purpose: the weight gathers, or the reductions' hop between nodes."""

    purpose: Budgeted
    hop: str  # name of the axis along which reductions cross nodes; empty for gathers
    codecs: tuple[Codec, ...]  # the candidates, the policy's own first
    units: tuple[str, ...]  # names of the units whose codec is chosen, in model order
    bytes: tuple[tuple[int, ...], ...]  # ``bytes[unit][codec]``: bytes of a rank's frames in a step
    limit: int  # most bytes that the frames of all units may take together

    def choose(self, errors: Sequence[Sequence[float]]) -> list[int]:
        """Returns, for each unit, the index in ``codecs`` of the codec chosen for it.

        ``errors[unit][codec]`` is the sum of squared errors over all ranks.
        """
        parts = [dict(enumerate(map(Cost, *costs))) for costs in zip(self.bytes, errors, strict=True)]
        return choose(parts, self.limit)


def shares_of(policy: Policy, topology: Topology, units: Sequence[UnitGeometry]) -> list[Share]:
    """Returns the shares of the policy's budget; an empty list if the policy has no budget.

    ``units`` are in model order; frozen and persistent units keep their codecs and are left out.

    Raises PolicyError: if the policy's own codecs, with which training begins, take more than the budget, or
    if all units are frozen or persistent.
    """
    kept, shares = kept_units(policy, units), []
    for purpose, codecs in policy.candidates.items():
        names, sizes, elements = [], [], 0
        for index, unit in enumerate(units):
            if not unit.trainable or unit.persistent:
                continue
            times, pieces = 1, [unit.shard]
            if purpose == "gradients":
                pieces = [end - start for start, end in chunked(unit.piece, policy.chunks, policy.grain)]
            elif policy.stage == 3 and policy.secondary == 0 and index not in kept:
                times = 2  # forward and backward
            names.append(unit.name)
            sizes.append(tuple(times * sum(map(codec.frame_bytes, pieces)) for codec in codecs))
            elements += times * sum(pieces)
        if not names:
            raise PolicyError(
                f"budget '{policy.budget}' has no unit to choose a codec for: all units are frozen or "
                "persistent; remove budget, or lower memory.persist_below"
            )
        initial, bits = sum(size[0] for size in sizes), getattr(policy.budget, purpose)
        limit = int(bits * elements / 8) if bits else initial
        if initial > limit:
            raise PolicyError(
                f"budget '{policy.budget}' allows {limit} bytes a rank for {purpose}, but {codecs[0]}, with "
                f"which training begins, takes {initial}: set {purpose} to a smaller codec, or raise the budget"
            )
        hop = topology.node_axis.name if purpose == "gradients" else ""
        shares.append(Share(purpose, hop, codecs, tuple(names), tuple(sizes), limit))
    return shares


def at_most(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], sent: Mapping[LedgerKey, int]
) -> dict[Link, int]:
    """Returns an upper bound of the bytes that a rank sends over each kind of link, whatever the budget chooses.

    ``sent`` are the bytes that the rank sends if every unit has the policy's own codecs.
    """
    left, totals = dict(sent), dict.fromkeys(get_args(Link), 0)
    for share in shares_of(policy, topology, units):
        sizes = {name: candidates[0] for name, candidates in zip(share.units, share.bytes, strict=True)}
        shared = {link: Counter[str]() for link in totals}  # bytes by unit
        for key in sent:
            if key.purpose == share.purpose and key.unit in sizes and share.hop in ("", key.hop):
                shared[key.link][key.unit] += left.pop(key)
        # The budget limits the bytes of frames, and a frame may be sent over a link several times.  No choice sends
        # more than giving the whole budget to the unit whose frames are sent most often.
        for link, counts in shared.items():
            most = (-(-nbytes * share.limit // sizes[unit]) for unit, nbytes in counts.items())
            totals[link] += max(most, default=0)
    for key, nbytes in left.items():
        totals[key.link] += nbytes
    return totals
