"""Schedule: which units to gather, wait for, reshard and reduce at each event of a pass.

Pure: no torch.  The engine reports an event (a unit is about to run, has run, ...) and carries
out the returned actions; a step-time simulator can drive the same object.  Actions name units by
index.  ``gather`` and ``wait`` are idempotent: a unit that is gathered or on its way stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

from impl.plan.policy import Policy
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import kept_units

MOST_AHEAD: Final = 4  # units under way at most: each holds a slot of the shared arena
Kind = Literal["gather", "wait", "release", "reduce"]


class Action(NamedTuple):
    """Start gathering a unit, wait for it, release it, or hand its gradient over for reduction."""

    kind: Kind
    unit: int


@dataclass(frozen=True)
class Schedule:
    """Order of units in a forward pass, and how far to gather ahead."""

    sizes: Sequence[int]  # padded elements of each unit, by index
    order: tuple[int, ...]  # the units that run one after the other, in forward order
    outer: tuple[int, ...]  # the units that are in use around all others (the root's)
    prefetch: int  # elements that may be gathered ahead of the unit in use
    max_live: int = 1 << 62  # elements that may be gathered at once; nothing is gathered ahead beyond it
    kept: frozenset[int] = frozenset()  # units that stay gathered from a forward pass to its backward pass
    # Gradients are reduced in model order, whatever ran; else in forward's, so that none waits for its turn.
    in_model_order: bool = False
    # By unit and whether backward: worked out once, as a model has as many events as units.
    _arrivals: dict[tuple[int, bool], tuple[Action, ...]] = field(
        default_factory=dict, init=False, compare=False
    )

    @classmethod
    def of(cls, policy: Policy, units: Sequence[UnitGeometry]) -> Schedule:
        """The schedule of a model's units, given in model order."""
        return cls(
            sizes=[unit.padded for unit in units],
            order=tuple(index for index, unit in enumerate(units) if not unit.outer),
            outer=tuple(index for index, unit in enumerate(units) if unit.outer),
            prefetch=policy.memory.prefetch,
            max_live=policy.memory.max_live,
            kept=kept_units(policy, units),
            in_model_order=policy.stage < 3,
        )

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """The one order in which all ranks issue gradient reductions."""
        order = sorted(self.order) if self.in_model_order else self.order
        return (*reversed(order), *self.outer)

    def pre_forward(self, unit: int) -> tuple[Action, ...]:
        """``unit`` is about to run: gather it, gather ahead, wait for it."""
        return self._arrive(unit, backward=False)

    def post_forward(self, unit: int, *, training: bool = True) -> tuple[Action, ...]:
        """``unit`` has run: its weights go, unless a backward pass follows for which they stay."""
        return () if training and unit in self.kept else (Action("release", unit),)

    def pre_backward(self, unit: int) -> tuple[Action, ...]:
        """The gradient reaches ``unit``: gather it again, gather the one before it, wait."""
        return self._arrive(unit, backward=True)

    def post_backward(self, unit: int) -> tuple[Action, ...]:
        """All gradients of ``unit`` are there: its weights go, its gradient is sent."""
        return Action("release", unit), Action("reduce", unit)

    def _arrive(self, unit: int, *, backward: bool) -> tuple[Action, ...]:
        actions = self._arrivals.get((unit, backward))
        if actions is None:
            order = tuple(reversed(self.order)) if backward else self.order
            ahead = [Action("gather", other) for other in self._ahead(unit, order)]
            actions = (Action("gather", unit), *ahead, Action("wait", unit))
            self._arrivals[unit, backward] = actions
        return actions

    def _ahead(self, unit: int, order: tuple[int, ...]) -> list[int]:
        """Units after ``unit`` in ``order`` that fit into the prefetch limit."""
        start = 0 if unit in self.outer else order.index(unit) + 1 if unit in order else len(order)
        ahead: list[int] = []
        stays = sum(self.sizes[index] for index in {*self.outer, *self.kept, unit})
        left = min(self.prefetch, self.max_live - stays)
        for other in order[start : start + MOST_AHEAD]:
            left -= self.sizes[other]
            if left < 0:
                break
            ahead.append(other)
        return ahead
