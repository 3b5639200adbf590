"""Schedule: which units to gather ahead and to keep, and in which order gradients are reduced.

Pure: no torch.  Units ask it at the events of a pass (:mod:`impl.unit.unit`); it knows them by index.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from impl.plan.policy import Policy
from impl.plan.shard_layout import UnitGeometry

MOST_AHEAD: Final = 4  # units under way; each holds a slot of the shared arena


@dataclass(frozen=True)
class Schedule:
    """Order of units in a forward pass, and how far to gather ahead."""

    sizes: Sequence[int]  # padded elements of each unit, by index
    order: tuple[int, ...]  # units that run one after the other, in forward order
    outer: tuple[int, ...]  # units in use around all others (the root's)
    prefetch: int  # elements that may be gathered ahead of the unit in use
    max_live: int = 1 << 62  # elements that may be gathered at once; nothing is gathered ahead beyond it
    kept: frozenset[int] = frozenset()  # units that stay gathered from a forward pass to its backward pass
    # Whether gradients are reduced in model order; else in forward order, so that none waits for its turn.
    in_model_order: bool = False
    frozen: frozenset[int] = frozenset()  # units without gradients, which are not reduced
    blocks: Sequence[str] = ()  # by unit, the block with which it runs; by default each runs by itself

    @classmethod
    def for_units(cls, policy: Policy, units: Sequence[UnitGeometry]) -> Schedule:
        """The schedule of a model's ``units``, in model order."""
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
        """The trained units, in the order in which all ranks start gradient reductions."""
        order = sorted(self.order) if self.in_model_order else self.order
        return tuple(unit for unit in (*reversed(order), *self.outer) if unit not in self.frozen)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """Units of one block, which run together, in forward order."""
        groups = itertools.groupby(self.order, lambda unit: self.blocks[unit] if self.blocks else unit)
        return tuple(tuple(units) for _, units in groups)

    def after(self, seen: Sequence[int]) -> Schedule:
        """The schedule of units ``seen`` to run in this order; units that did not run come last."""
        return replace(self, order=(*seen, *(index for index in self.order if index not in seen)))

    @cached_property
    def ahead_in_forward(self) -> Sequence[Sequence[int]]:
        """For each unit, those to gather ahead before it runs, in order."""
        return [self._ahead(unit, self.order) for unit in range(len(self.sizes))]

    @cached_property
    def ahead_in_backward(self) -> Sequence[Sequence[int]]:
        """For each unit, those to gather ahead when its output's gradient arrives, in order."""
        return [self._ahead(unit, self.order[::-1]) for unit in range(len(self.sizes))]

    def _ahead(self, unit: int, order: tuple[int, ...]) -> list[int]:
        """Units after ``unit`` in ``order`` that fit into the prefetch limit."""
        start = 0 if unit in self.outer else order.index(unit) + 1 if unit in order else len(order)
        ahead: list[int] = []
        stays = sum(self.sizes[index] for index in {*self.outer, *self.kept, unit})
        left = min(self.prefetch, self.max_live - stays)
        for index in order[start : start + MOST_AHEAD]:
            left -= self.sizes[index]
            if left < 0:
                break
            ahead.append(index)
        return ahead


def kept_units(policy: Policy, units: Sequence[UnitGeometry]) -> frozenset[int]:
    """Indices of the units that stay gathered from a forward pass to its backward pass.

    Outer units end forward and begin backward, so they stay unless ``max_reuse`` is 0.  On one rank all units
    stay: gathering again would cast the masters again, 6 bytes a parameter, to save 2.  Whole blocks stay,
    from the last one on, while fewer than ``max_reuse`` elements run between their forward and their
    backward, and all that is gathered at once is within ``max_live``.  With two planes none stays: backward
    computes with the other one.  ``units`` are in model order.
    """
    if policy.planes > 1:
        return frozenset()
    limits, sizes = policy.memory, Counter[str]()  # of blocks, in model order
    for unit in units:
        sizes.update({} if unit.outer else {unit.block: unit.padded})
    live = sum(unit.padded for unit in units if unit.outer)
    kept = {unit.block for unit in units if unit.outer and limits.max_reuse}
    reuse = math.inf if limits.max_reuse and units and units[0].world == 1 else limits.max_reuse
    between = 0
    for name in reversed(sizes):
        others = max((size for other, size in sizes.items() if other != name), default=0)
        if between >= reuse or live + sizes[name] + others > limits.max_live:
            break
        kept.add(name)
        live += sizes[name]
        between += 2 * sizes[name]
    return frozenset(index for index, unit in enumerate(units) if unit.block in kept)
