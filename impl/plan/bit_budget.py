"""Chooses a codec for each unit, so that all messages fit into a budget of bytes and the sum of errors is small.

A unit is a group of parameters that are sent together, and a codec encodes elements as bytes.  The problem is a
multiple-choice knapsack, which is solved greedily.  Every unit starts with its smallest codec.  Then codecs are changed
one by one.  A change must reduce the error and fit into the rest of the budget.  Of all such changes, the one that
reduces the error most for each additional byte is made next.  At the end, the choice found in this way is compared with
the choices that give all units the same codec.  Among all these choices that fit into the budget, the result is the
choice with the smallest sum of errors.

:func:`shares_of` derives the budget in bytes from a policy, :class:`Share` chooses codecs by their measured errors, and
:func:`at_most` bounds the traffic of any choice.

This module does not import torch.
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
    """The cost of sending one unit (group of parameters) in one codec: the bytes, and the sum of squared errors."""

    bytes: int
    error: float


class BudgetError(ValueError):
    """Raised when all messages together exceed a budget of bytes even in their smallest codecs.

    Attributes:
        needed: the bytes that all messages have together in their smallest codecs.
    """

    def __init__(self, budget: int, needed: int) -> None:
        super().__init__(
            f"a budget of {budget} bytes is too small: the smallest codecs take {needed} bytes; allow at least "
            f"{needed} bytes"
        )
        self.needed = needed


def bytes_within(bits: float, elements: float) -> int:
    """Returns the number of bytes, rounded down, of ``elements`` elements that have ``bits`` bits each."""
    return int(bits * elements / 8)


def bits_for(nbytes: int, elements: float) -> float:
    """Returns how many bits an element must have so that ``elements`` elements have at least ``nbytes`` bytes.

    The result is rounded up to hundredths of a bit.
    """
    hundredths = int(-(-800 * nbytes // elements))
    while bytes_within(hundredths / 100, elements) < nbytes:  # by rounding
        hundredths += 1
    return hundredths / 100


def choose(parts: Sequence[Mapping[_Name, Cost]], budget: int) -> list[_Name]:
    """Chooses a codec for each of ``parts``, and returns the names of the chosen codecs.

    A part has all messages of one unit (group of parameters).  ``parts[part][name]`` is the cost of sending this part
    in the codec called ``name``.  All parts have the same codecs to choose from.  In the chosen codecs, all parts
    together have at most ``budget`` bytes, and the sum of their errors is small (the top of this file describes the
    search).

    Raises BudgetError: if the parts have more than ``budget`` bytes even in their smallest codecs.
    """
    chosen = [min(part, key=part.__getitem__) for part in parts]
    spent = total(parts, chosen).bytes
    if spent > budget:
        raise BudgetError(budget, spent)
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
    """Returns the cost of all ``parts`` together: the sum of their bytes and the sum of their errors.

    A part has all messages of one unit (group of parameters).  ``parts[part][name]`` is the cost of sending this part
    in the codec called ``name``, and ``chosen[part]`` is the name of the part's codec.
    """
    costs = [part[name] for part, name in zip(parts, chosen, strict=True)]
    return Cost(sum(cost.bytes for cost in costs), sum(cost.error for cost in costs))


@dataclass(frozen=True, slots=True)
class Share:
    """A limit on the bytes of one kind of messages, with the units that share the limit and their possible codecs.

    The messages are either those that gather weights, or those that reduce gradients between nodes.  A unit is a group
    of parameters that are sent together.  For each of the ``units``, a codec is chosen from ``codecs``, so that all
    messages together stay within ``limit`` bytes.
    """

    purpose: Budgeted
    hop: str  # name of the axis along which reductions cross nodes; empty for gathers
    codecs: tuple[Codec, ...]  # the codecs to choose from; the first is the policy's codec
    units: tuple[str, ...]  # names of the units whose codec is chosen, in model order
    # ``bytes[unit][codec]``: bytes that a rank encodes in a step for this unit, if the unit has this codec
    bytes: tuple[tuple[int, ...], ...]
    limit: int  # most bytes that a rank may encode in a step for all units together

    def choose(self, errors: Sequence[Sequence[float]]) -> list[int]:
        """Chooses a codec for each unit within the limit, and returns, for each unit, the codec's index in ``codecs``.

        A unit is a group of parameters.  ``errors[unit][codec]`` is the sum of squared errors over all ranks if the
        unit is sent in this codec.
        """
        parts = [dict(enumerate(map(Cost, *costs))) for costs in zip(self.bytes, errors, strict=True)]
        return choose(parts, self.limit)


def shares_of(policy: Policy, topology: Topology, units: Sequence[UnitGeometry]) -> list[Share]:
    """Returns the limits that the policy's budget sets, converted from bits for each element to bytes in a step.

    Each limit is a :class:`Share`.  There is at most one share for weights and one for gradients.  If the policy has no
    budget, the list is empty.  ``units`` are the model's units (groups of parameters) in model order.  The shares leave
    out two kinds of units, which keep the policy's codec: frozen units, and persistent units, whose small parameters
    stay gathered.

    Raises PolicyError: if the codecs of the policy, with which training begins, need more bytes than the budget
    allows; or if all units are frozen or persistent.
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
                f"budget '{policy.budget}' has no unit to choose a codec for: all units are frozen or persistent; "
                "remove budget, train some parameters, or lower memory.persist_below"
            )
        initial, bits = sum(size[0] for size in sizes), getattr(policy.budget, purpose)
        limit = bytes_within(bits, elements) if bits else initial
        if initial > limit:
            needed = bits_for(initial, elements)
            raise PolicyError(
                f"budget '{policy.budget}' allows {bits:.10g} bits for each element of {purpose}, but training begins "
                f"with {codecs[0]}, which takes {needed:g} bits with scales and padding: set {purpose} to a smaller "
                f"codec, or set '{purpose} {needed:g}' in budget"
            )
        hop = topology.node_axis.name if purpose == "gradients" else ""
        shares.append(Share(purpose, hop, codecs, tuple(names), tuple(sizes), limit))
    return shares


def at_most(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], sent: Mapping[LedgerKey, int]
) -> dict[Link, int]:
    """Returns, for each kind of link, an upper bound of the bytes that a rank sends, whichever codecs a budget chooses.

    ``sent`` has the bytes that a rank sends if all messages are in the policy's own codecs.  They are listed by phase,
    purpose, unit (group of parameters), axis and link (:class:`~impl.plan.traffic.LedgerKey`).

    The bound is the sum of two parts.  Messages for which a budget chooses the codec are counted as if the whole budget
    went to one unit: the unit whose encoded bytes are sent most often over the link.  All other messages are counted
    with their bytes in ``sent``.
    """
    left, totals = dict(sent), dict.fromkeys(get_args(Link), 0)
    for share in shares_of(policy, topology, units):
        sizes = {name: candidates[0] for name, candidates in zip(share.units, share.bytes, strict=True)}
        shared = {link: Counter[str]() for link in totals}  # bytes by unit
        for key in sent:
            if key.purpose == share.purpose and key.unit in sizes and share.hop in ("", key.hop):
                shared[key.link][key.unit] += left.pop(key)
        # The budget limits the bytes that a rank encodes, and each encoded byte may be sent over a link several times.
        # The most bytes are sent if the whole budget goes to the unit whose bytes are sent most often.
        for link, counts in shared.items():
            most = (-(-nbytes * share.limit // sizes[unit]) for unit, nbytes in counts.items())
            totals[link] += max(most, default=0)
    for key, nbytes in left.items():
        totals[key.link] += nbytes
    return totals
