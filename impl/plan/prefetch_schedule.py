"""Decides which units are gathered ahead, which stay gathered, and in which order gradients are reduced.

Units look these decisions up in a :class:`Schedule` at the events of a pass (:mod:`impl.unit.unit`); so does
the simulation of a step (:mod:`impl.plan.timeline`).  A schedule refers to units by their index in model
order.  Pure: no torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from impl.policy.policy import MOST_LIVE, Policy
from impl.policy.shard_layout import UnitGeometry

MOST_AHEAD: Final = 4  # most units gathered ahead at once; each holds a slot of the shared memory


@dataclass(frozen=True)
class Schedule:
    """The order in which units run, and what is gathered ahead and kept."""

    sizes: Sequence[int]  # padded elements of each unit, by index
    order: tuple[int, ...]  # the units that run one after the other, in forward order
    outer: tuple[int, ...]  # the units in use during the whole pass (the root's, and the persistent ones)
    # Most elements gathered ahead; the next unit may exceed this limit.  0: nothing is gathered ahead.
    prefetch: int
    # Most elements gathered at once; nothing is gathered ahead beyond this number.  None: ``MOST_LIVE``, but the next
    # unit is gathered ahead whatever its size.
    max_live: int | None = None
    kept: frozenset[int] = frozenset()  # the units that stay gathered from forward to backward
    # Whether gradients are reduced in reverse model order; else in reverse forward order, in which gradients
    # arrive, so that no reduction waits for its turn.
    in_model_order: bool = False
    frozen: frozenset[int] = frozenset()  # the units without gradients, which are not reduced
    blocks: Sequence[str] = ()  # for each unit, the block with which it runs; empty: each unit runs by itself

    @classmethod
    def for_units(cls, policy: Policy, units: Sequence[UnitGeometry]) -> Schedule:
        """Returns the schedule of a model whose ``units`` are in model order."""
        return cls(
            sizes=[unit.padded for unit in units],
            order=tuple(index for index, unit in enumerate(units) if not unit.outer),
            outer=tuple(index for index, unit in enumerate(units) if unit.outer),
            prefetch=policy.memory.prefetch,
            max_live=policy.memory.max_live,
            kept=kept_units(policy, units),
            in_model_order=policy.stage < 3,
            frozen=frozenset(index for index, unit in enumerate(units) if not unit.trainable),
            blocks=[unit.block for unit in units],
        )

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """The indices of the trained units, in the order in which all ranks start gradient reductions."""
        order = sorted(self.order) if self.in_model_order else self.order
        return tuple(unit for unit in (*reversed(order), *self.outer) if unit not in self.frozen)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The units' indices, grouped by block, in forward order; the units of a block run together."""
        groups = itertools.groupby(self.order, lambda unit: self.blocks[unit] if self.blocks else unit)
        return tuple(tuple(units) for _, units in groups)

    def after(self, seen: Sequence[int]) -> Schedule:
        """Returns this schedule with the units in the order ``seen`` in a pass; units that did not run come last."""
        return replace(self, order=(*seen, *(index for index in self.order if index not in seen)))

    @cached_property
    def ahead_in_forward(self) -> Sequence[Sequence[int]]:
        """For each unit, the indices of the units to gather ahead when it is about to run in forward, in order."""
        return [self._ahead(unit, self.order) for unit in range(len(self.sizes))]

    @cached_property
    def ahead_in_backward(self) -> Sequence[Sequence[int]]:
        """For each unit, the indices of the units to gather ahead when its output's gradient arrives, in order."""
        return [self._ahead(unit, self.order[::-1]) for unit in range(len(self.sizes))]

    def _ahead(self, unit: int, order: tuple[int, ...]) -> list[int]:
        """Returns the indices of the units after ``unit`` in ``order`` that fit into the limits, in order.

        The first of them may be larger than ``prefetch`` (see :class:`~impl.policy.policy.MemoryLimits`).
        """
        start = 0 if unit in self.outer else order.index(unit) + 1 if unit in order else len(order)
        ahead: list[int] = []
        stays = sum(self.sizes[index] for index in {*self.outer, *self.kept, unit})
        free = (MOST_LIVE if self.max_live is None else self.max_live) - stays
        taken = 0
        for index in order[start : start + MOST_AHEAD] if self.prefetch else ():
            taken += self.sizes[index]
            is_next = not ahead
            if taken > self.prefetch and not is_next:
                break
            if taken > free and not (is_next and self.max_live is None):
                break
            ahead.append(index)
        return ahead


def kept_units(policy: Policy, units: Sequence[UnitGeometry]) -> frozenset[int]:
    """Returns the indices of the units that stay gathered from a forward pass to its backward pass.

    Outer units are used last in forward and first in backward, so they stay unless ``max_reuse`` is 0.  In
    addition whole blocks stay, beginning with the last, as long as fewer than ``max_reuse`` elements run between their
    forward and their backward pass and all that is gathered at once fits into ``max_live``.  On one rank,
    ``max_reuse`` does not limit the blocks: resharding would save 2 bytes a parameter, and gathering again would
    move 6 (to cast the masters).  With two planes no unit stays, since backward computes with the other plane.

    ``units`` are in model order.
    """
    if policy.planes != 1:
        return frozenset()
    limits, sizes = policy.memory, Counter[str]()  # elements by block, in model order
    for unit in units:
        sizes.update({} if unit.outer else {unit.block: unit.padded})
    live = sum(unit.padded for unit in units if unit.outer)
    kept = {unit.block for unit in units if unit.outer and limits.max_reuse}
    reuse = math.inf if limits.max_reuse and units and units[0].world == 1 else limits.max_reuse
    between, max_live = 0, MOST_LIVE if limits.max_live is None else limits.max_live
    for name in reversed(sizes):
        others = max((size for other, size in sizes.items() if other != name), default=0)
        if between >= reuse or live + sizes[name] + others > max_live:
            break
        kept.add(name)
        live += sizes[name]
        between += 2 * sizes[name]
    return frozenset(index for index, unit in enumerate(units) if unit.block in kept)
